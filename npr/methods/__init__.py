"""Federated methods: what a site optimises, what it shares, and how it predicts (docs/methods.md).

Other packages come in through `registry`. A method shares a weighted sum of vectors and nothing else, so that every
method runs under secure aggregation unchanged; `creff` is the exception and `local` shares nothing. No method opens a
file or a connection.

Imported by: coordinator, npr, npr.dp, npr.lab, site_agent.

    fednpr        FedNPR and FedNPR-Per, the product's own methods
    base          what a method is
    site          what one hospital holds
    regulariser   prototypes and their loss, for any method
    registry      the names of methods
    fedavg        the weighted mean of everything; and all images in one place
    fedprox       FedAvg with a pull towards the received model
    fedlc         logits shifted by class frequency
    fedrs         logits of absent classes scaled down
    balancefl     local training as if the classes were balanced
    moon          a contrastive loss against the received and the previous model
    fedper        a shared extractor, a personal head
    fedrep        head first, then extractor
    fedbabu       only the extractor is trained and shared; heads are fitted at the end
    fedrod        a shared head with a personal one added to it
    local         every site alone; and the initial features as they are
    creff         laboratory only: the server does more than take a mean
"""
