"""The operator's page: what the coordinator does, read-only, in a thread beside the run.

It reads the database through a connection that cannot write, and never keeps the run waiting. It shows nothing about
patients, and of the model only what the sum publishes anyway.

Imported by: coordinator.

    server       address, token and files
    state_json   the page as one JSON value
    study        runs before and after this one, the estimated end, how far logs are witnessed
    live         what is under way now
    metrics      `/metrics`
"""
