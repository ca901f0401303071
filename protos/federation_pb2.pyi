from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromSite(_message.Message):
    __slots__ = ("sequence", "log_head", "hello", "ready", "refusal", "advert", "shares", "accusation", "upload_header", "upload_frame", "agree", "unmask", "disclosure", "abort", "rollback", "chunk_request", "ack", "open", "pong", "decline", "model_request", "head", "cosignature", "held")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_HEAD_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_HEADER_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FRAME_FIELD_NUMBER: _ClassVar[int]
    AGREE_FIELD_NUMBER: _ClassVar[int]
    UNMASK_FIELD_NUMBER: _ClassVar[int]
    DISCLOSURE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    COSIGNATURE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    log_head: SignedHead
    hello: Hello
    ready: Ready
    refusal: Refusal
    advert: Advert
    shares: Shares
    accusation: Accusation
    upload_header: UploadHeader
    upload_frame: UploadFrame
    agree: Agree
    unmask: Unmask
    disclosure: Disclosure
    abort: Abort
    rollback: Rollback
    chunk_request: ChunkRequest
    ack: Ack
    open: Open
    pong: Pong
    decline: Decline
    model_request: ModelRequest
    head: Head
    cosignature: Cosignature
    held: Held
    def __init__(self, sequence: _Optional[int] = ..., log_head: _Optional[_Union[SignedHead, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., advert: _Optional[_Union[Advert, _Mapping]] = ..., shares: _Optional[_Union[Shares, _Mapping]] = ..., accusation: _Optional[_Union[Accusation, _Mapping]] = ..., upload_header: _Optional[_Union[UploadHeader, _Mapping]] = ..., upload_frame: _Optional[_Union[UploadFrame, _Mapping]] = ..., agree: _Optional[_Union[Agree, _Mapping]] = ..., unmask: _Optional[_Union[Unmask, _Mapping]] = ..., disclosure: _Optional[_Union[Disclosure, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., chunk_request: _Optional[_Union[ChunkRequest, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., model_request: _Optional[_Union[ModelRequest, _Mapping]] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., cosignature: _Optional[_Union[Cosignature, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ...) -> None: ...

class FromCoordinator(_message.Message):
    __slots__ = ("sequence", "log_head", "train_order", "plan", "adverts", "deliver", "accusation", "upload_resume", "survivors", "quorum", "result", "sum_frame", "disclosure", "abort_request", "rollback", "audit_order", "chunk_piece", "result_certificate", "jump", "state_frame", "welcome", "manifest_frame", "ping", "receipt", "goodbye", "model_frame", "witness_call", "head", "cosignature", "held", "run_stop")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_HEAD_FIELD_NUMBER: _ClassVar[int]
    TRAIN_ORDER_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ADVERTS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_FIELD_NUMBER: _ClassVar[int]
    ACCUSATION_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_RESUME_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    SUM_FRAME_FIELD_NUMBER: _ClassVar[int]
    DISCLOSURE_FIELD_NUMBER: _ClassVar[int]
    ABORT_REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    AUDIT_ORDER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_PIECE_FIELD_NUMBER: _ClassVar[int]
    RESULT_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    JUMP_FIELD_NUMBER: _ClassVar[int]
    STATE_FRAME_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FRAME_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FRAME_FIELD_NUMBER: _ClassVar[int]
    WITNESS_CALL_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    COSIGNATURE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    RUN_STOP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    log_head: SignedHead
    train_order: TrainOrder
    plan: Plan
    adverts: Adverts
    deliver: Deliver
    accusation: Accusation
    upload_resume: UploadResume
    survivors: Survivors
    quorum: Quorum
    result: Result
    sum_frame: SumFrame
    disclosure: Disclosure
    abort_request: AbortRequest
    rollback: Rollback
    audit_order: AuditOrder
    chunk_piece: ChunkPiece
    result_certificate: ResultCertificate
    jump: Jump
    state_frame: StateFrame
    welcome: Welcome
    manifest_frame: ManifestFrame
    ping: Ping
    receipt: Receipt
    goodbye: Goodbye
    model_frame: ModelFrame
    witness_call: WitnessCall
    head: Head
    cosignature: Cosignature
    held: Held
    run_stop: RunStop
    def __init__(self, sequence: _Optional[int] = ..., log_head: _Optional[_Union[SignedHead, _Mapping]] = ..., train_order: _Optional[_Union[TrainOrder, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., adverts: _Optional[_Union[Adverts, _Mapping]] = ..., deliver: _Optional[_Union[Deliver, _Mapping]] = ..., accusation: _Optional[_Union[Accusation, _Mapping]] = ..., upload_resume: _Optional[_Union[UploadResume, _Mapping]] = ..., survivors: _Optional[_Union[Survivors, _Mapping]] = ..., quorum: _Optional[_Union[Quorum, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., sum_frame: _Optional[_Union[SumFrame, _Mapping]] = ..., disclosure: _Optional[_Union[Disclosure, _Mapping]] = ..., abort_request: _Optional[_Union[AbortRequest, _Mapping]] = ..., rollback: _Optional[_Union[Rollback, _Mapping]] = ..., audit_order: _Optional[_Union[AuditOrder, _Mapping]] = ..., chunk_piece: _Optional[_Union[ChunkPiece, _Mapping]] = ..., result_certificate: _Optional[_Union[ResultCertificate, _Mapping]] = ..., jump: _Optional[_Union[Jump, _Mapping]] = ..., state_frame: _Optional[_Union[StateFrame, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., manifest_frame: _Optional[_Union[ManifestFrame, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., model_frame: _Optional[_Union[ModelFrame, _Mapping]] = ..., witness_call: _Optional[_Union[WitnessCall, _Mapping]] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., cosignature: _Optional[_Union[Cosignature, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., run_stop: _Optional[_Union[RunStop, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("site", "open_ctx", "round", "result")
    SITE_FIELD_NUMBER: _ClassVar[int]
    OPEN_CTX_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    site: str
    open_ctx: bytes
    round: int
    result: bytes
    def __init__(self, site: _Optional[str] = ..., open_ctx: _Optional[bytes] = ..., round: _Optional[int] = ..., result: _Optional[bytes] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("site", "result", "state_hash", "bitmap", "vote", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    result: bytes
    state_hash: bytes
    bitmap: bytes
    vote: int
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., result: _Optional[bytes] = ..., state_hash: _Optional[bytes] = ..., bitmap: _Optional[bytes] = ..., vote: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class CheckCertificate(_message.Message):
    __slots__ = ("acks",)
    ACKS_FIELD_NUMBER: _ClassVar[int]
    acks: _containers.RepeatedCompositeFieldContainer[Ack]
    def __init__(self, acks: _Optional[_Iterable[_Union[Ack, _Mapping]]] = ...) -> None: ...

class TrainOrder(_message.Message):
    __slots__ = ("round", "state_hash", "config_hash", "prev_result", "check")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    PREV_RESULT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    round: int
    state_hash: bytes
    config_hash: bytes
    prev_result: bytes
    check: CheckCertificate
    def __init__(self, round: _Optional[int] = ..., state_hash: _Optional[bytes] = ..., config_hash: _Optional[bytes] = ..., prev_result: _Optional[bytes] = ..., check: _Optional[_Union[CheckCertificate, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("site", "round")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    site: str
    round: int
    def __init__(self, site: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class CohortMember(_message.Message):
    __slots__ = ("site", "cert")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CERT_FIELD_NUMBER: _ClassVar[int]
    site: str
    cert: bytes
    def __init__(self, site: _Optional[str] = ..., cert: _Optional[bytes] = ...) -> None: ...

class RepeatOf(_message.Message):
    __slots__ = ("ctx", "survivors")
    CTX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    ctx: bytes
    survivors: bytes
    def __init__(self, ctx: _Optional[bytes] = ..., survivors: _Optional[bytes] = ...) -> None: ...

class EarlierSum(_message.Message):
    __slots__ = ("round", "sites")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    round: int
    sites: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., sites: _Optional[_Iterable[str]] = ...) -> None: ...

class RoundContext(_message.Message):
    __slots__ = ("version", "federation", "manifest_hash", "run", "round", "attempt", "n", "t", "a", "c", "m", "members", "coordinator_cert", "suite", "repeats", "sums", "state_hash", "config_hash", "layout_hash", "prev_result")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    T_FIELD_NUMBER: _ClassVar[int]
    A_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    M_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_CERT_FIELD_NUMBER: _ClassVar[int]
    SUITE_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    PREV_RESULT_FIELD_NUMBER: _ClassVar[int]
    version: int
    federation: str
    manifest_hash: bytes
    run: str
    round: int
    attempt: int
    n: int
    t: int
    a: int
    c: int
    m: int
    members: _containers.RepeatedCompositeFieldContainer[CohortMember]
    coordinator_cert: bytes
    suite: str
    repeats: _containers.RepeatedCompositeFieldContainer[RepeatOf]
    sums: _containers.RepeatedCompositeFieldContainer[EarlierSum]
    state_hash: bytes
    config_hash: bytes
    layout_hash: bytes
    prev_result: bytes
    def __init__(self, version: _Optional[int] = ..., federation: _Optional[str] = ..., manifest_hash: _Optional[bytes] = ..., run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., n: _Optional[int] = ..., t: _Optional[int] = ..., a: _Optional[int] = ..., c: _Optional[int] = ..., m: _Optional[int] = ..., members: _Optional[_Iterable[_Union[CohortMember, _Mapping]]] = ..., coordinator_cert: _Optional[bytes] = ..., suite: _Optional[str] = ..., repeats: _Optional[_Iterable[_Union[RepeatOf, _Mapping]]] = ..., sums: _Optional[_Iterable[_Union[EarlierSum, _Mapping]]] = ..., state_hash: _Optional[bytes] = ..., config_hash: _Optional[bytes] = ..., layout_hash: _Optional[bytes] = ..., prev_result: _Optional[bytes] = ...) -> None: ...

class AbortLine(_message.Message):
    __slots__ = ("site", "code", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    code: int
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., code: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class AbortCertificate(_message.Message):
    __slots__ = ("ctx", "lines")
    CTX_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    ctx: bytes
    lines: _containers.RepeatedCompositeFieldContainer[AbortLine]
    def __init__(self, ctx: _Optional[bytes] = ..., lines: _Optional[_Iterable[_Union[AbortLine, _Mapping]]] = ...) -> None: ...

class NamedRoot(_message.Message):
    __slots__ = ("site", "root")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    site: str
    root: bytes
    def __init__(self, site: _Optional[str] = ..., root: _Optional[bytes] = ...) -> None: ...

class Signed(_message.Message):
    __slots__ = ("site", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Advert(_message.Message):
    __slots__ = ("site", "ctx", "mask_key", "mask_kem", "share_key", "share_kem", "pair_hashes", "commitment", "sequence", "log_size", "log_root", "ledger_head", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CTX_FIELD_NUMBER: _ClassVar[int]
    MASK_KEY_FIELD_NUMBER: _ClassVar[int]
    MASK_KEM_FIELD_NUMBER: _ClassVar[int]
    SHARE_KEY_FIELD_NUMBER: _ClassVar[int]
    SHARE_KEM_FIELD_NUMBER: _ClassVar[int]
    PAIR_HASHES_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOG_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOG_ROOT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_HEAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    ctx: bytes
    mask_key: bytes
    mask_kem: bytes
    share_key: bytes
    share_kem: bytes
    pair_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    commitment: bytes
    sequence: int
    log_size: int
    log_root: bytes
    ledger_head: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., ctx: _Optional[bytes] = ..., mask_key: _Optional[bytes] = ..., mask_kem: _Optional[bytes] = ..., share_key: _Optional[bytes] = ..., share_kem: _Optional[bytes] = ..., pair_hashes: _Optional[_Iterable[bytes]] = ..., commitment: _Optional[bytes] = ..., sequence: _Optional[int] = ..., log_size: _Optional[int] = ..., log_root: _Optional[bytes] = ..., ledger_head: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DealtLine(_message.Message):
    __slots__ = ("holder", "b_hash", "s_hash", "box", "pair", "kem_key", "path")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    B_HASH_FIELD_NUMBER: _ClassVar[int]
    S_HASH_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    KEM_KEY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    holder: str
    b_hash: bytes
    s_hash: bytes
    box: bytes
    pair: bytes
    kem_key: bytes
    path: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, holder: _Optional[str] = ..., b_hash: _Optional[bytes] = ..., s_hash: _Optional[bytes] = ..., box: _Optional[bytes] = ..., pair: _Optional[bytes] = ..., kem_key: _Optional[bytes] = ..., path: _Optional[_Iterable[bytes]] = ...) -> None: ...

class OpenedShare(_message.Message):
    __slots__ = ("share", "line")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    share: bytes
    line: DealtLine
    def __init__(self, share: _Optional[bytes] = ..., line: _Optional[_Union[DealtLine, _Mapping]] = ...) -> None: ...

class FraudProof(_message.Message):
    __slots__ = ("advert", "kx", "root", "deal_signature", "kind", "shares")
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    DEAL_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    advert: Advert
    kx: bytes
    root: bytes
    deal_signature: bytes
    kind: int
    shares: _containers.RepeatedCompositeFieldContainer[OpenedShare]
    def __init__(self, advert: _Optional[_Union[Advert, _Mapping]] = ..., kx: _Optional[bytes] = ..., root: _Optional[bytes] = ..., deal_signature: _Optional[bytes] = ..., kind: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[OpenedShare, _Mapping]]] = ...) -> None: ...

class PairFraud(_message.Message):
    __slots__ = ("advert", "kx", "root", "deal_signature", "seed", "line")
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    DEAL_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    advert: Advert
    kx: bytes
    root: bytes
    deal_signature: bytes
    seed: bytes
    line: DealtLine
    def __init__(self, advert: _Optional[_Union[Advert, _Mapping]] = ..., kx: _Optional[bytes] = ..., root: _Optional[bytes] = ..., deal_signature: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., line: _Optional[_Union[DealtLine, _Mapping]] = ...) -> None: ...

class RepeatCertificate(_message.Message):
    __slots__ = ("ctx", "kx", "deals", "roots", "agreements", "frauds", "pair_frauds")
    CTX_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    DEALS_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    FRAUDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_FRAUDS_FIELD_NUMBER: _ClassVar[int]
    ctx: bytes
    kx: bytes
    deals: bytes
    roots: _containers.RepeatedCompositeFieldContainer[NamedRoot]
    agreements: _containers.RepeatedCompositeFieldContainer[Signed]
    frauds: _containers.RepeatedCompositeFieldContainer[FraudProof]
    pair_frauds: _containers.RepeatedCompositeFieldContainer[PairFraud]
    def __init__(self, ctx: _Optional[bytes] = ..., kx: _Optional[bytes] = ..., deals: _Optional[bytes] = ..., roots: _Optional[_Iterable[_Union[NamedRoot, _Mapping]]] = ..., agreements: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., frauds: _Optional[_Iterable[_Union[FraudProof, _Mapping]]] = ..., pair_frauds: _Optional[_Iterable[_Union[PairFraud, _Mapping]]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("context", "check", "aborts", "repeats", "signature")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    context: RoundContext
    check: CheckCertificate
    aborts: _containers.RepeatedCompositeFieldContainer[AbortCertificate]
    repeats: _containers.RepeatedCompositeFieldContainer[RepeatCertificate]
    signature: bytes
    def __init__(self, context: _Optional[_Union[RoundContext, _Mapping]] = ..., check: _Optional[_Union[CheckCertificate, _Mapping]] = ..., aborts: _Optional[_Iterable[_Union[AbortCertificate, _Mapping]]] = ..., repeats: _Optional[_Iterable[_Union[RepeatCertificate, _Mapping]]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("site", "ctx")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CTX_FIELD_NUMBER: _ClassVar[int]
    site: str
    ctx: bytes
    def __init__(self, site: _Optional[str] = ..., ctx: _Optional[bytes] = ...) -> None: ...

class Adverts(_message.Message):
    __slots__ = ("ctx", "adverts")
    CTX_FIELD_NUMBER: _ClassVar[int]
    ADVERTS_FIELD_NUMBER: _ClassVar[int]
    ctx: bytes
    adverts: _containers.RepeatedCompositeFieldContainer[Advert]
    def __init__(self, ctx: _Optional[bytes] = ..., adverts: _Optional[_Iterable[_Union[Advert, _Mapping]]] = ...) -> None: ...

class DealtShare(_message.Message):
    __slots__ = ("b_hash", "s_hash", "box", "pair")
    B_HASH_FIELD_NUMBER: _ClassVar[int]
    S_HASH_FIELD_NUMBER: _ClassVar[int]
    BOX_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    b_hash: bytes
    s_hash: bytes
    box: bytes
    pair: bytes
    def __init__(self, b_hash: _Optional[bytes] = ..., s_hash: _Optional[bytes] = ..., box: _Optional[bytes] = ..., pair: _Optional[bytes] = ...) -> None: ...

class Shares(_message.Message):
    __slots__ = ("site", "kx", "shares", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    kx: bytes
    shares: _containers.RepeatedCompositeFieldContainer[DealtShare]
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., kx: _Optional[bytes] = ..., shares: _Optional[_Iterable[_Union[DealtShare, _Mapping]]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SignedRoot(_message.Message):
    __slots__ = ("site", "root", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    root: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., root: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class DeliveredShare(_message.Message):
    __slots__ = ("dealer", "share", "path")
    DEALER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    dealer: str
    share: DealtShare
    path: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, dealer: _Optional[str] = ..., share: _Optional[_Union[DealtShare, _Mapping]] = ..., path: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Deliver(_message.Message):
    __slots__ = ("kx", "roots", "shares")
    KX_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    kx: bytes
    roots: _containers.RepeatedCompositeFieldContainer[SignedRoot]
    shares: _containers.RepeatedCompositeFieldContainer[DeliveredShare]
    def __init__(self, kx: _Optional[bytes] = ..., roots: _Optional[_Iterable[_Union[SignedRoot, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[DeliveredShare, _Mapping]]] = ...) -> None: ...

class Accusation(_message.Message):
    __slots__ = ("site", "kx", "dealer", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    DEALER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    kx: bytes
    dealer: str
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., kx: _Optional[bytes] = ..., dealer: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("site", "kx", "deals", "length", "root", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    DEALS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    kx: bytes
    deals: bytes
    length: int
    root: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., kx: _Optional[bytes] = ..., deals: _Optional[bytes] = ..., length: _Optional[int] = ..., root: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class UploadFrame(_message.Message):
    __slots__ = ("kx", "index", "data")
    KX_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    kx: bytes
    index: int
    data: bytes
    def __init__(self, kx: _Optional[bytes] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadResume(_message.Message):
    __slots__ = ("kx", "next_frame")
    KX_FIELD_NUMBER: _ClassVar[int]
    NEXT_FRAME_FIELD_NUMBER: _ClassVar[int]
    kx: bytes
    next_frame: int
    def __init__(self, kx: _Optional[bytes] = ..., next_frame: _Optional[int] = ...) -> None: ...

class Survivors(_message.Message):
    __slots__ = ("kx", "uploads")
    KX_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_FIELD_NUMBER: _ClassVar[int]
    kx: bytes
    uploads: _containers.RepeatedCompositeFieldContainer[SignedRoot]
    def __init__(self, kx: _Optional[bytes] = ..., uploads: _Optional[_Iterable[_Union[SignedRoot, _Mapping]]] = ...) -> None: ...

class Agree(_message.Message):
    __slots__ = ("site", "kx", "survivors", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    kx: bytes
    survivors: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., kx: _Optional[bytes] = ..., survivors: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Quorum(_message.Message):
    __slots__ = ("kx", "survivors", "agreements")
    KX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    kx: bytes
    survivors: bytes
    agreements: _containers.RepeatedCompositeFieldContainer[Signed]
    def __init__(self, kx: _Optional[bytes] = ..., survivors: _Optional[bytes] = ..., agreements: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ...) -> None: ...

class Unmask(_message.Message):
    __slots__ = ("site", "kx", "survivors", "shares", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    kx: bytes
    survivors: bytes
    shares: _containers.RepeatedScalarFieldContainer[bytes]
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., kx: _Optional[bytes] = ..., survivors: _Optional[bytes] = ..., shares: _Optional[_Iterable[bytes]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("context", "adverts", "deals", "uploads", "agreements", "verdict", "sum_root", "seeds", "keys", "pairs", "state_hash", "movements", "signature")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ADVERTS_FIELD_NUMBER: _ClassVar[int]
    DEALS_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENTS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SUM_ROOT_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    MOVEMENTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    context: RoundContext
    adverts: _containers.RepeatedCompositeFieldContainer[Advert]
    deals: bytes
    uploads: _containers.RepeatedCompositeFieldContainer[NamedRoot]
    agreements: _containers.RepeatedCompositeFieldContainer[Signed]
    verdict: int
    sum_root: bytes
    seeds: _containers.RepeatedScalarFieldContainer[bytes]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    pairs: _containers.RepeatedScalarFieldContainer[bytes]
    state_hash: bytes
    movements: bytes
    signature: bytes
    def __init__(self, context: _Optional[_Union[RoundContext, _Mapping]] = ..., adverts: _Optional[_Iterable[_Union[Advert, _Mapping]]] = ..., deals: _Optional[bytes] = ..., uploads: _Optional[_Iterable[_Union[NamedRoot, _Mapping]]] = ..., agreements: _Optional[_Iterable[_Union[Signed, _Mapping]]] = ..., verdict: _Optional[int] = ..., sum_root: _Optional[bytes] = ..., seeds: _Optional[_Iterable[bytes]] = ..., keys: _Optional[_Iterable[bytes]] = ..., pairs: _Optional[_Iterable[bytes]] = ..., state_hash: _Optional[bytes] = ..., movements: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class SumFrame(_message.Message):
    __slots__ = ("result", "index", "data")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    index: int
    data: bytes
    def __init__(self, result: _Optional[bytes] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Disclosure(_message.Message):
    __slots__ = ("site", "kx", "holder", "b_share", "s_share", "pair", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    KX_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    B_SHARE_FIELD_NUMBER: _ClassVar[int]
    S_SHARE_FIELD_NUMBER: _ClassVar[int]
    PAIR_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    kx: bytes
    holder: str
    b_share: bytes
    s_share: bytes
    pair: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., kx: _Optional[bytes] = ..., holder: _Optional[str] = ..., b_share: _Optional[bytes] = ..., s_share: _Optional[bytes] = ..., pair: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("context", "signature")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    context: RoundContext
    signature: bytes
    def __init__(self, context: _Optional[_Union[RoundContext, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("site", "ctx", "code", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    CTX_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    ctx: bytes
    code: int
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., ctx: _Optional[bytes] = ..., code: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Rollback(_message.Message):
    __slots__ = ("advert",)
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    advert: Advert
    def __init__(self, advert: _Optional[_Union[Advert, _Mapping]] = ...) -> None: ...

class AuditOrder(_message.Message):
    __slots__ = ("result", "absent")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    absent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, result: _Optional[bytes] = ..., absent: _Optional[_Iterable[str]] = ...) -> None: ...

class ChunkRequest(_message.Message):
    __slots__ = ("site", "result", "chunk")
    SITE_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    site: str
    result: bytes
    chunk: int
    def __init__(self, site: _Optional[str] = ..., result: _Optional[bytes] = ..., chunk: _Optional[int] = ...) -> None: ...

class ChunkPiece(_message.Message):
    __slots__ = ("result", "chunk", "site", "data", "path")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    chunk: int
    site: str
    data: bytes
    path: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, result: _Optional[bytes] = ..., chunk: _Optional[int] = ..., site: _Optional[str] = ..., data: _Optional[bytes] = ..., path: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ResultCertificate(_message.Message):
    __slots__ = ("result", "check")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    result: bytes
    check: CheckCertificate
    def __init__(self, result: _Optional[bytes] = ..., check: _Optional[_Union[CheckCertificate, _Mapping]] = ...) -> None: ...

class Jump(_message.Message):
    __slots__ = ("result", "check")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    result: Result
    check: CheckCertificate
    def __init__(self, result: _Optional[_Union[Result, _Mapping]] = ..., check: _Optional[_Union[CheckCertificate, _Mapping]] = ...) -> None: ...

class StateFrame(_message.Message):
    __slots__ = ("state_hash", "index", "data")
    STATE_HASH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    state_hash: bytes
    index: int
    data: bytes
    def __init__(self, state_hash: _Optional[bytes] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "federation", "site", "session", "manifest_version", "manifest_hash")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    federation: str
    site: str
    session: int
    manifest_version: int
    manifest_hash: bytes
    def __init__(self, protocol: _Optional[int] = ..., federation: _Optional[str] = ..., site: _Optional[str] = ..., session: _Optional[int] = ..., manifest_version: _Optional[int] = ..., manifest_hash: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "manifest_version", "manifest_hash")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    manifest_version: int
    manifest_hash: bytes
    def __init__(self, protocol: _Optional[int] = ..., manifest_version: _Optional[int] = ..., manifest_hash: _Optional[bytes] = ...) -> None: ...

class ManifestFrame(_message.Message):
    __slots__ = ("version", "length", "index", "data")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    version: int
    length: int
    index: int
    data: bytes
    def __init__(self, version: _Optional[int] = ..., length: _Optional[int] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("site", "round", "seconds")
    SITE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    site: str
    round: int
    seconds: int
    def __init__(self, site: _Optional[str] = ..., round: _Optional[int] = ..., seconds: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("sequence", "entry", "path")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    entry: int
    path: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequence: _Optional[int] = ..., entry: _Optional[int] = ..., path: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("code",)
    CODE_FIELD_NUMBER: _ClassVar[int]
    code: int
    def __init__(self, code: _Optional[int] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("manifest_version", "next_frame")
    MANIFEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_FRAME_FIELD_NUMBER: _ClassVar[int]
    manifest_version: int
    next_frame: int
    def __init__(self, manifest_version: _Optional[int] = ..., next_frame: _Optional[int] = ...) -> None: ...

class ModelFrame(_message.Message):
    __slots__ = ("digest", "length", "index", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    length: int
    index: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., length: _Optional[int] = ..., index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WitnessCall(_message.Message):
    __slots__ = ("witness", "held_size")
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    HELD_SIZE_FIELD_NUMBER: _ClassVar[int]
    witness: str
    held_size: int
    def __init__(self, witness: _Optional[str] = ..., held_size: _Optional[int] = ...) -> None: ...

class HeadSignature(_message.Message):
    __slots__ = ("name", "key_id", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    key_id: bytes
    value: bytes
    def __init__(self, name: _Optional[str] = ..., key_id: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class SignedHead(_message.Message):
    __slots__ = ("origin", "size", "root", "signatures")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    origin: str
    size: int
    root: bytes
    signatures: _containers.RepeatedCompositeFieldContainer[HeadSignature]
    def __init__(self, origin: _Optional[str] = ..., size: _Optional[int] = ..., root: _Optional[bytes] = ..., signatures: _Optional[_Iterable[_Union[HeadSignature, _Mapping]]] = ...) -> None: ...

class EpochKey(_message.Message):
    __slots__ = ("public", "endorser", "signature")
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    ENDORSER_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public: bytes
    endorser: bytes
    signature: bytes
    def __init__(self, public: _Optional[bytes] = ..., endorser: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Head(_message.Message):
    __slots__ = ("witness", "old_size", "path", "head", "epochs")
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    OLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    witness: str
    old_size: int
    path: _containers.RepeatedScalarFieldContainer[bytes]
    head: SignedHead
    epochs: _containers.RepeatedCompositeFieldContainer[EpochKey]
    def __init__(self, witness: _Optional[str] = ..., old_size: _Optional[int] = ..., path: _Optional[_Iterable[bytes]] = ..., head: _Optional[_Union[SignedHead, _Mapping]] = ..., epochs: _Optional[_Iterable[_Union[EpochKey, _Mapping]]] = ...) -> None: ...

class Cosignature(_message.Message):
    __slots__ = ("origin", "size", "signature")
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    origin: str
    size: int
    signature: HeadSignature
    def __init__(self, origin: _Optional[str] = ..., size: _Optional[int] = ..., signature: _Optional[_Union[HeadSignature, _Mapping]] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("witness", "head", "epochs")
    WITNESS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    witness: str
    head: SignedHead
    epochs: _containers.RepeatedCompositeFieldContainer[EpochKey]
    def __init__(self, witness: _Optional[str] = ..., head: _Optional[_Union[SignedHead, _Mapping]] = ..., epochs: _Optional[_Iterable[_Union[EpochKey, _Mapping]]] = ...) -> None: ...

class RunStop(_message.Message):
    __slots__ = ("run", "manifest_hash", "signature")
    RUN_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run: str
    manifest_hash: bytes
    signature: bytes
    def __init__(self, run: _Optional[str] = ..., manifest_hash: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
