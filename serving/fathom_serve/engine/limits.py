"""Sizes of an engine."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineLimits(BaseModel):
    """What one engine may hold and run at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_active: int = Field(default=16, ge=1, description="requests in flight")
    max_queued: int = Field(default=64, ge=0, description="requests that wait; more are refused with 503")
    rows_per_tick: int = Field(default=512, ge=1, description="rows of one forward")
    policy: Literal["shared", "published", "prefill_first"] = Field(
        default="shared", description="which rows run first; the others are for comparison"
    )
    ageing_ticks: int = Field(default=256, ge=1, description="waiting that makes up for a class of priority")
    head_rows: int = Field(default=64, ge=1, description="rows whose logits exist at once")
    page_rows: int = Field(default=16, ge=1, description="entries of a page")
    cache_block_tokens: int = Field(
        default=64, ge=0, description="block of the prefix cache, a multiple of page_rows; 0: off"
    )
    kv_memory_mb: int = Field(default=512, ge=1, description="keys and values of all requests, MiB")
    pages: int | None = Field(default=None, ge=1, description="pages, instead of kv_memory_mb")
    context_tokens: int | None = Field(default=None, ge=2, description="prompt and answer; default the model's")
    max_depth: int | None = Field(default=None, ge=1, description="M, if not the model's; it may be above the trained")
    default_max_tokens: int = Field(default=256, ge=1, description="answer length when a request names none")
    books: Literal["idle", "tick"] = Field(default="idle", description="when the page books are checked")

    @model_validator(mode="after")
    def check(self) -> "EngineLimits":
        """Every request in flight must be able to run a row in every tick, and a block to end where a page does."""
        if self.rows_per_tick < self.max_active:
            raise ValueError("rows_per_tick is below max_active: a request could wait for ever")
        if self.cache_block_tokens % self.page_rows:
            raise ValueError(f"cache_block_tokens must be a multiple of page_rows, {self.page_rows}, or 0")
        return self
