"""The operator's page: what the coordinator does, read-only, in a thread beside the run.

It reads the database through a connection that cannot write, and never keeps the run waiting. It shows nothing about
patients, and of the model only what the sum publishes anyway.

Imported by: coordinator.

    server       address, token and files; `/metrics`
    state_json   the page as one JSON value
    live         what is under way now; runs before and after this one, and the estimated end
"""
