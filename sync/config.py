"""The sync section of the experiment file. Plain pydantic: this package imports no other house."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0, le=1e6)]
"""As the other sections have them."""


class SyncConfig(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        strict=True,  # else true would be 1
    )

    address: str = "tcp://127.0.0.1:5702"
    """Where the learner's publisher listens for members; beyond loopback only with security.keys."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of the broadcast group; auto takes nccl where learner and engine have CUDA."""
    shared_memory: bool = True
    """While every server runs on the learner's machine as its user, versions are not sent on CPU but lie in
    memory that the learner shares with them."""
    bucket_mib: int | None = Field(default=None, ge=1)
    """Bytes broadcast at a time; null takes 64 on CPU and 512 on GPU."""
    join_timeout_s: Seconds = 1200.0
    """How long the first publish waits for the first member: an engine may load a large model for minutes."""
    transfer_timeout_s: Seconds = 60.0
    """Deadline of each phase of a publish: regroup, each bucket, load."""
    heartbeat_timeout_s: Seconds = 30.0
    """A member silent for this long is evicted."""
