"""The hospital's own page, `site-agent status --web`: what was sent, what was trained, what is stored.

Only the command and the screenshots import this package. It reads the state folder and never writes to it; it listens
on this machine only, with a token for each start. Nothing on the page names a patient.

Imported by: site_agent.

    content   the page as one JSON value, and its server
"""
