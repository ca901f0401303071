"""The laboratory: the command `npr-lab` compares methods on one machine or on a Ray cluster (docs/lab.md).

Benchmarks and the demo use it; a real federation never does. It needs no key and no coordinator; with `--aggregation
secure` both sides of the real protocol run in one process.

Imported by: nothing; it is run.

    cli         the command; the initial model of a federation
    request     from options to a checked plan
    plan        settings and the cells to run
    cell        one training run: train, keep the models, score them on the validation side
    models      trained models and their scores on one side of the data
    predictors  head, prototypes, refitted head and mixtures: prediction as an axis of its own
    choices     what the validation sides choose, and the one look at test images after it
    run         one run of a plan
    engines     cells in this process, in worker processes or on a Ray cluster
    store       results.json and the folders of cells
    summary     from cells to the rows of a table
    tables      Markdown tables, and the figures of the paper
    plots       figures (matplotlib)
    secure      the sum of a round through the real protocol
    plugins     methods and data sets from files of the user
    bench       `npr-lab bench`
    dp_bench    what a private step costs
"""
