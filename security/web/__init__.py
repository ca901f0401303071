"""Small read-only pages for the people who run a party: requests and answers without sockets, and one thin server."""
