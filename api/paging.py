"""Lists as OpenAI's clients page through them: a total order, exact `has_more`, cursors that survive deletion.

A list is a sorted set whose members are `<created_at, 12 digits>:<id>` at score 0, so that Redis orders it by
(created_at, id) and a page begins at any point, whether or not that member still stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..shared.clients import AsyncClient
from .fields import integer_text, invalid_value

Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class PageQuery:
    """What a list route was asked for; `after` is the id of the last item that the client has."""

    limit: int
    order: Order = "desc"
    after: str | None = None

    @classmethod
    def parse(cls, params: Mapping[str, str], *, default: int, maximum: int) -> PageQuery:
        """Raises InvalidRequest on a limit outside 1..maximum or an unknown order."""
        order = params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid_value("order", order, ("asc", "desc"))
        limit = integer_text("limit", params["limit"], 1, maximum) if "limit" in params else default
        return cls(limit=limit, order="asc" if order == "asc" else "desc", after=params.get("after") or None)


def list_body(items: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object around `items`."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def index_member(created_at: int, item_id: str) -> str:
    """The member of a list's sorted set that stands for an item."""
    return f"{created_at:012d}:{item_id}"


def text(reply: object) -> str:
    """A reply of a client that speaks bytes, as text; none is empty."""
    return reply.decode() if isinstance(reply, bytes) else ""


async def page_ids(redis: AsyncClient, index: str, query: PageQuery, after: int | None) -> tuple[list[str], bool]:
    """The ids of one page and whether more follow.

    Args:
        index: key of the sorted set.
        after: `created_at` of the item `query.after`, or None on the first page.
    """
    cursor = f"({index_member(after, query.after)}" if after is not None and query.after else None
    if query.order == "asc":
        members = await redis.zrangebylex(index, cursor or "-", "+", start=0, num=query.limit + 1)
    else:
        members = await redis.zrevrangebylex(index, cursor or "+", "-", start=0, num=query.limit + 1)
    ids = [text(member).split(":", 1)[1] for member in members]
    return ids[: query.limit], len(ids) > query.limit
