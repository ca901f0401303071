"""Training and the trained model: torch and images.

The commands `evaluate`, `predict` and `export` run it in a process without network and without the federation's private
keys (`process`). The training agent still runs it inside its own process. Nothing here opens a connection, except that
several processes of one hospital may train together (`workers`). What it returns to the agent is one vector and figures
for this hospital.

    training     local rounds on the state that the chain of results names
    workers      several processes of one hospital that train as one
    ranks        the place of this process among them
    data         the images of this hospital
    process      the isolated process of a command that sees images
    isolation    what is in force in it, tried from inside
    kernel       network namespace, seccomp and Landlock
    predictor    the site's model, ready to use
    predict      `site-agent predict`
    evaluation   `site-agent evaluate`
    export       `site-agent export`
    model_card   MODEL_CARD.md
"""
