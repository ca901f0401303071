"""`python -m site_agent` is the command `site-agent`."""

from site_agent.cli import main

main()
