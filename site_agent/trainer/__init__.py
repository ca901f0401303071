"""Training and the trained model: torch and images, in processes without network and without private keys.

The trainer (`__main__`) works for a running agent; the commands `evaluate`, `predict` and `export` run in a process of
their own (`site_agent.command_process`). Nothing here opens a connection, except that several processes of one hospital
may train together (`workers`). What the trainer returns to the agent is one vector and figures for this hospital
(`channel`).

Imported by: site_agent, site_agent.archive, site_agent.checks, site_agent.page.

    __main__         the trainer's process: isolated, then loaded
    orders           its loop: orders of the agent in, updates and figures out
    channel          the messages between agent and trainer
    shared_memory    vectors and documents that cannot be changed any more
    data_checks      the checks of `site-agent check` that see images
    trial            a short round, to tell its time and memory
    training         local rounds on the state that the chain of results names
    plugin           a method of one's own, if manifest and hospital approve it
    personal_state   what it keeps from round to round
    workers          several processes of one hospital that train as one
    ranks            the place of this process among them
    data             the images of this hospital
    isolation        the isolation of a process that sees images: its files, and what is in force, tried from inside
    kernel           network namespace, seccomp and Landlock
    predictor        the site's model, ready to use
    predict          `site-agent predict`
    reports          predictions as DICOM structured reports
    evaluation       `site-agent evaluate`, and the same hospital without a federation, to compare with
    clinical_figures  its figures of each class against the others, also by subgroup of patients
    evaluation_page  its page with plots
    export           `site-agent export`
    model_card       MODEL_CARD.md
"""
