"""The configuration tree: mirrored one to one by the YAML file, frozen, every field documented.

This file owns defaults, bounds and cross-field checks. Reading files, environment and ``--set``
is ``protocol.load``'s work. Unknown keys are refused.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocol.types import Mode


class Section(BaseModel):
    """Base of every section: frozen, unknown keys and infinite numbers refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Profile(StrEnum):
    """Where the token budget starts when ``max_num_batched_tokens`` is ``auto``."""

    CHAT = "chat"
    MIXED = "mixed"
    BATCH = "batch"


class ModelConfig(Section):
    """Which model is served and how."""

    path: str = Field(
        description="Local Hugging Face folder (config, safetensors, tokenizer), or a GGUF file."
    )
    served_name: str | None = Field(
        None, description="Name clients use; default: the folder's name."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and cache; auto: float32 on CPU, the checkpoint's on GPU."
    )
    max_model_len: int | None = Field(
        None, gt=0, description="Longest prompt plus answer in tokens; default: the model's own."
    )


class ResourceConfig(Section):
    """What Ray reserves for one worker."""

    num_cpus: float = Field(1, ge=0, description="CPUs of one worker.")
    num_gpus: float = Field(0, ge=0, description="GPUs of one worker; 0: it computes on the CPU.")
    custom: dict[str, float] = Field(default_factory=dict, description="Ray custom resources.")


class PoolConfig(Section):
    """One pool of equal workers."""

    replicas: int = Field(1, ge=0, description="Workers in this pool.")
    max_num_batched_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Token budget: most tokens one step may compute."
    )
    max_num_seqs: int = Field(32, ge=1, description="Most sequences in one step.")
    min_prefill_tokens: int = Field(
        64, ge=1, description="Share of the budget that waiting prompts always get."
    )
    threads: int = Field(1, ge=1, description="CPU threads of one worker's compute, per rank.")
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Ranks of one worker, each with a slice of every layer; heads and KV heads "
        "must divide. Needs mode: colocated.",
    )
    resources: ResourceConfig = ResourceConfig()

    @model_validator(mode="after")
    def _budget_holds_decodes_and_prefill(self) -> PoolConfig:
        budget = self.max_num_batched_tokens
        if budget != "auto" and budget < self.max_num_seqs + self.min_prefill_tokens:
            raise ValueError(
                f"max_num_batched_tokens {budget} is smaller than max_num_seqs "
                f"{self.max_num_seqs} + min_prefill_tokens {self.min_prefill_tokens} = "
                f"{self.max_num_seqs + self.min_prefill_tokens}"
            )
        return self

    @model_validator(mode="after")
    def _every_rank_has_its_gpu(self) -> PoolConfig:
        gpus = self.resources.num_gpus
        if 0 < gpus < self.tensor_parallel:
            raise ValueError(
                f"resources.num_gpus {gpus:g} for tensor_parallel {self.tensor_parallel}: a "
                f"worker needs a GPU for each of its ranks"
            )
        return self


class PoolsConfig(Section):
    """The two pools. ``prefill`` is unused in colocated mode."""

    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()


class SloConfig(Section):
    """Latency targets."""

    ttft_ms: float = Field(2000, gt=0, description="Time to first token; orders prompts by slack.")
    itl_ms: float = Field(
        300, gt=0, description="Gap between two tokens of one answer; later ones are counted."
    )


class KvConfig(Section):
    """The paged KV cache and its way from worker to worker."""

    page_size: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="Tokens per page; auto is 16."
    )
    memory: str = Field(
        "auto",
        description='Size per worker ("2GiB") or share of free device memory ("80%"), divided by '
        "the workers there. auto: 1 GiB on a CPU, half of what is free on a GPU.",
    )
    transport: Literal["auto", "p2p", "loopback"] = Field("auto", description="auto is p2p.")
    interface: str = Field(
        "auto", description="Address the data sockets bind to; must be private. auto: 127.0.0.1."
    )
    window: int = Field(8, ge=1, description="Segments of one ticket in flight on a link.")
    reserve: int = Field(
        64,
        ge=0,
        description="Tokens of growth per running answer that a decode worker keeps free when it "
        "takes a request in. Less: more preemptions; more: fewer answers at once.",
    )
    host_memory: str = Field(
        "auto",
        description="Host memory per decode worker for pages of preempted answers: a size, a share "
        'of what is free ("10%") or "0". auto: none on CPU; on a GPU as much as the pool, at most '
        "a quarter of what is free.",
    )


class TimingConfig(Section):
    """Every clock of the system, in seconds unless the name says otherwise. Tests scale it."""

    heartbeat_s: float = Field(1, gt=0, description="Between two heartbeats on every stream.")
    peer_dead_s: float = Field(
        4, gt=0, description="No heartbeat and no progress for so long: the peer is lost."
    )
    lease_s: float = Field(
        10, gt=0, description="Credit and pages that their peer has not named for so long end."
    )
    link_op_s: float = Field(4, gt=0, description="Longest wait for one operation of a KV link.")
    link_abort_s: float = Field(
        5, gt=0, description="A link whose abort takes longer makes its worker unhealthy."
    )
    closed_or_killed_s: float = Field(
        2, gt=0, description="Promise, no knob: after a death or a closed stream both legs end."
    )
    cancel_ms: float = Field(
        100, gt=0, description="Promise, no knob: a hang-up ends both legs so long after the step."
    )
    drain_s: float = Field(
        120, gt=0, description="Longest time that running requests get when a worker is drained."
    )
    request_timeout_s: float = Field(
        600, gt=0, description="Longest life of a request; a client's own deadline may be shorter."
    )
    stuck_step_s: float = Field(
        120, gt=0, description="A step that runs longer: its worker made no progress and is lost."
    )
    start_s: float = Field(300, gt=0, description="Longest wait for a worker to become ready.")


class LimitsConfig(Section):
    """Bounds that protect the router."""

    max_queued: int = Field(256, ge=0, description="Requests waiting for a place; then 503.")
    stream_buffer: int = Field(1024, ge=1, description="Tokens a slow reader may lag behind.")
    max_request_bytes: int = Field(
        1 << 20,
        ge=1024,
        description="Largest request body. Parsing holds the interpreter: 8 MiB cost 0.5 s, in "
        "which no stream moves.",
    )
    request_body_s: float = Field(
        30, gt=0, description="Longest wait for a request's whole body, seconds; then 408."
    )


class RouterConfig(Section):
    """Where clients connect."""

    http: str = Field("127.0.0.1:8000", description="OpenAI HTTP address.")
    grpc: str = Field("127.0.0.1:9000", description="gRPC address.")
    limits: LimitsConfig = LimitsConfig()


class RayConfig(Section):
    """Which Ray cluster runs the actors."""

    address: str = Field("local", description="local, auto, or ray://host:port.")


class DebugConfig(Section):
    """Switches that cost time and find faults."""

    poison_freed_pages: bool = Field(False, description="Fill freed pages with NaN.")


class TandemConfig(Section):
    """The whole file."""

    name: str = Field("tandem", pattern=r"^[a-z0-9][a-z0-9-]*$", description="Cluster name.")
    model: ModelConfig
    mode: Mode = Field(
        Mode.DISAGGREGATED,
        description="disaggregated: prompts are read by the prefill pool and handed over; "
        "colocated: every decode worker does both.",
    )
    chunked_prefill: bool = Field(
        True, description="False runs a whole prompt in one step: shows the freeze."
    )
    profile: Profile = Field(
        Profile.CHAT,
        description="How large an automatic token budget may become: on a CPU 512, 1,024, 2,048, "
        "on a GPU 2,048, 8,192, 16,384 for chat, mixed, batch; batch looks at no target.",
    )
    pools: PoolsConfig = PoolsConfig()
    slo: SloConfig = SloConfig()
    kv: KvConfig = KvConfig()
    timing: TimingConfig = TimingConfig()
    router: RouterConfig = RouterConfig()
    ray: RayConfig = RayConfig()
    debug: DebugConfig = DebugConfig()

    @model_validator(mode="after")
    def _ranks_hand_nothing_over(self) -> TandemConfig:
        if self.mode is Mode.DISAGGREGATED:
            for name, pool in (("prefill", self.pools.prefill), ("decode", self.pools.decode)):
                if pool.tensor_parallel > 1:
                    raise ValueError(
                        f"pools.{name}.tensor_parallel {pool.tensor_parallel} with mode "
                        f"disaggregated: ranks do not hand their KV over; use mode: colocated"
                    )
        return self
