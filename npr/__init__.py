"""Learning: models, losses, prototypes, methods, data, and the laboratory that compares them.

It imports `security` and `lazaret`. Nothing here sends: what leaves a site is the vector of `Method.contribution`, and
prototypes, class counts and personal heads are not in it (docs/methods.md).

Imported by: coordinator, npr.data, npr.dp, npr.lab, npr.methods, site_agent.

    config         how a site trains: one frozen object with a digest
    recipe         a manifest's settings, their hash, and the digest of the learning code; without torch
    model          a classifier, split into feature extractor and head
    backbones      networks of timm and MONAI, and their pretrained weights
    device         processor or graphics card, precision, and the one way of values to the host
    depthwise      fast weight gradients of depthwise convolutions
    params         which parameters make up the shared vector
    wire_layout    from a model to the layout of the vector, and back
    plugin         a method of one's own: the bytes of its file, run in this process
    task           one label of an image or several: targets, losses, prototypes and probabilities
    losses         losses on features and logits
    prototypes     the prototypes of a site, and the balanced assignment of features to them (Sinkhorn)
    training       the inner loop
    distributed    several processes that train one model
    federation     all sites in one process, without a network
    deployed       a trained model as it is used and exported: ONNX, MONAI bundle
    metrics        accuracy, AUC and calibration
    bootstrap      confidence intervals by patient
    clinical       sensitivity, PR-AUC, calibration and decision curves of one class against the others
    tracking       learning curves as files for TensorBoard and MLflow
    seeds          every random draw of the learning code, from one seed
    methods        federated methods, FedNPR first
    data           data sets, images, batches
    dp             mechanisms that read patients under differential privacy
    lab            the command `npr-lab`
"""
