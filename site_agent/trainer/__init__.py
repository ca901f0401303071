"""Training and the trained model: torch and images, without network and without keys.

The agent starts it, and the commands `evaluate`, `predict` and `export` use it. Nothing here opens a connection, except
that several processes of one hospital may train together (`workers`). What it returns to the agent is one vector
and figures for this hospital.

    training     local rounds on the state that the chain of results names
    workers      several processes of one hospital that train as one
    ranks        the place of this process among them
    data         the images of this hospital
    predictor    the site's model, ready to use
    predict      `site-agent predict`
    evaluation   `site-agent evaluate`
    export       `site-agent export`
    model_card   MODEL_CARD.md
"""
