"""A slow second opinion in plain Python, written from the RFCs and docs/spec/secure-aggregation.md.

It imports nothing from the packages it judges and uses no library but the standard one. It is neither fast nor safe
against timing, and is for test vectors only.
"""
