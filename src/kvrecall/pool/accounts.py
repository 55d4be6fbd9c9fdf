"""Who holds how much of a tier: bytes by tenant, their limits, each tenant's own order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvrecall.block import BlockKey, Tenant
from kvrecall.pool.eviction.lru import LruPolicy


@dataclass(frozen=True, slots=True)
class TenantUse:
    """One tenant's part of a tier. ``limit_bytes`` is None where there is none; ``refused`` and
    ``evicted`` count blocks since the tenant last came to the tier, for its limit's sake."""

    tenant: Tenant
    used_bytes: int
    limit_bytes: int | None
    refused: int
    evicted: int


class _Account:
    __slots__ = ("evicted", "order", "refused", "used_bytes")

    def __init__(self, order: LruPolicy | None) -> None:
        self.used_bytes = 0
        self.refused = 0
        self.evicted = 0
        self.order = order


class Accounts:
    """The tenants of one tier. Not thread-safe; never waits.

    If ``bounded``, each tenant's blocks are also kept in an order of their own (least recently
    used, suffixes before prefixes), so that a tenant at its limit can give up its own coldest
    block without a search among those of all others.
    """

    def __init__(self, bounded: bool, limit_of: Callable[[Tenant], int | None]) -> None:
        self._bounded = bounded
        self._limit_of = limit_of
        self._accounts: dict[Tenant, _Account] = {}
        self.refused = 0
        self.evicted = 0

    def charge(self, tenant: Tenant, nbytes: int) -> None:
        """The tenant got that much room."""
        account = self._accounts.get(tenant)
        if account is None:
            account = _Account(LruPolicy() if self._bounded else None)
            self._accounts[tenant] = account
        account.used_bytes += nbytes

    def refund(self, tenant: Tenant, nbytes: int) -> None:
        """The tenant gave that much back; one that holds nothing any more is forgotten."""
        account = self._accounts[tenant]
        account.used_bytes -= nbytes
        if not account.used_bytes:
            del self._accounts[tenant]

    def used(self, tenant: Tenant) -> int:
        """Bytes the tenant holds."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.used_bytes

    def excess(self, tenant: Tenant, nbytes: int) -> int:
        """By how much ``nbytes`` more would be above the tenant's limit; 0 if they would not."""
        limit = self._limit_of(tenant) if self._bounded else None
        return 0 if limit is None else max(0, self.used(tenant) + nbytes - limit)

    def refuse(self, tenant: Tenant, blocks: int) -> None:
        """Blocks were not taken for the sake of the limit."""
        self.refused += blocks
        if tenant in self._accounts:
            self._accounts[tenant].refused += blocks

    def evict(self, tenant: Tenant, blocks: int) -> None:
        """Blocks were evicted for the sake of the limit."""
        self.evicted += blocks
        if tenant in self._accounts:
            self._accounts[tenant].evicted += blocks

    # -- each tenant's order ---------------------------------------------------------------

    def join(self, tenant: Tenant, key: BlockKey, parent: BlockKey | None) -> None:
        """A block of the tenant, which is charged for it, can be evicted from now on."""
        if self._bounded:
            order = self._accounts[tenant].order
            assert order is not None
            order.insert(key, parent, 0, 0.0)

    def leave(self, tenant: Tenant, key: BlockKey) -> None:
        """It cannot any more."""
        account = self._accounts.get(tenant)
        if account is not None and account.order is not None:
            account.order.remove(key)

    def access(self, tenant: Tenant, chain: Sequence[BlockKey]) -> None:
        """A request of the tenant used ``chain``."""
        account = self._accounts.get(tenant)
        if account is not None and account.order is not None:
            account.order.access(chain, 0.0)

    def oldest(self, tenant: Tenant) -> Iterator[BlockKey]:
        """The tenant's blocks in the order in which it gives them up."""
        account = self._accounts.get(tenant)
        return iter(()) if account is None or account.order is None else account.order.oldest()

    @property
    def is_bounded(self) -> bool:
        return self._bounded

    def uses(self) -> list[TenantUse]:
        """Tenants that hold something."""
        return [
            TenantUse(
                tenant,
                account.used_bytes,
                self._limit_of(tenant) if self._bounded else None,
                account.refused,
                account.evicted,
            )
            for tenant, account in self._accounts.items()
        ]
