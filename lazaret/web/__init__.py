"""The server of the read-only pages: the operator's dashboard and the page of a hospital.

It answers GET and HEAD only and changes nothing. Whoever serves a page decides which address it listens on and who is
let in; `access` has the rules.

Imported by: coordinator, site_agent.

    access       which addresses and host names are allowed, and the token
    http         requests and answers as values
    connection   uvicorn and h11 with limits of our own
    server       from a path to its content; the socket, in a thread of its own
"""
