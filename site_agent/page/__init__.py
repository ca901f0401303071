"""The hospital's own page: what left, what was learnt, what is here. For the machine it runs on only."""
