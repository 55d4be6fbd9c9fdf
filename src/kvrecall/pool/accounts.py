"""The share of a tier that each tenant has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvrecall.block import Tenant
from kvrecall.pool.eviction.base import NumberRefs
from kvrecall.pool.eviction.queues import LruPolicy, QueueLinks


@dataclass(frozen=True, slots=True)
class TenantUse:
    """One tenant's share of a tier. ``limit_bytes`` is None without a limit; ``refused`` and
    ``evicted`` count blocks since the tenant last came to the tier, because of its limit."""

    tenant: Tenant
    used_bytes: int
    limit_bytes: int | None
    refused: int
    evicted: int


@dataclass(slots=True)
class Account:
    """One tenant's. ``orders``: its eviction orders, of tails and of other blocks; none if tenants
    are not limited. ``blocks`` counts those that are in them, or will be taken out of them."""

    tenant: Tenant
    number: int
    orders: tuple[LruPolicy, ...]
    used_bytes: int = 0
    blocks: int = 0
    refused: int = 0
    evicted: int = 0


class Accounts:
    """The bytes that each tenant holds in a tier, and if tenants are ``bounded``, the order in
    which its blocks are evicted. Not thread-safe; never waits."""

    def __init__(self, bounded: bool, limit_of: Callable[[Tenant], int | None]) -> None:
        self.is_bounded = bounded
        self._limit_of = limit_of
        self._accounts: dict[Tenant, Account] = {}
        self.by_number: list[Account] = []
        self._unused: list[int] = []  # numbers of accounts that ended
        self._links: QueueLinks | None = None
        self.refused = 0
        self.evicted = 0

    def begin(self, names: NumberRefs) -> None:
        # QueueLinks of their own: a block is in the order of its tenant and in the policy's.
        self._links = QueueLinks(names) if self.is_bounded else None
        for account in self._accounts.values():
            account.orders = self._new_orders()

    def _new_orders(self) -> tuple[LruPolicy, ...]:
        return (LruPolicy(self._links), LruPolicy(self._links)) if self._links else ()

    def _open(self, tenant: Tenant) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            number = self._unused.pop() if self._unused else len(self.by_number)
            account = self._accounts[tenant] = Account(tenant, number, self._new_orders())
            self.by_number[number : number + 1] = (account,)
        return account

    def _close(self, account: Account) -> None:
        if not account.used_bytes and not account.blocks:
            del self._accounts[account.tenant]
            self._unused.append(account.number)

    def charge(self, tenant: Tenant, nbytes: int) -> None:
        self._open(tenant).used_bytes += nbytes

    def refund(self, tenant: Tenant, nbytes: int) -> None:
        account = self._accounts[tenant]
        account.used_bytes -= nbytes
        self._close(account)

    def enter(self, tenant: Tenant, blocks: int = 1) -> int:
        """Adds blocks to those of a tenant; returns the number of its account."""
        account = self._open(tenant)
        account.blocks += blocks
        return account.number

    def leave(self, number: int) -> None:
        """Undoes ``enter`` of one block."""
        account = self.by_number[number]
        account.blocks -= 1
        self._close(account)

    def excess(self, tenant: Tenant, nbytes: int) -> int:
        """Bytes by which ``nbytes`` more would exceed the tenant's limit; 0 if they would not."""
        limit = self._limit_of(tenant) if self.is_bounded else None
        if limit is None:
            return 0
        account = self._accounts.get(tenant)
        used = 0 if account is None else account.used_bytes
        return max(0, used + nbytes - limit)

    def limited(self, tenant: Tenant, refused: int = 0, evicted: int = 0) -> None:
        """Counts blocks refused or evicted because of the limit."""
        for one in (self, self._accounts.get(tenant)):
            if one is not None:
                one.refused += refused
                one.evicted += evicted

    def orders(self, tenant: Tenant) -> tuple[LruPolicy, ...]:
        """The tenant's eviction orders, of tails and of other blocks; none if tenants are not
        limited, or this one holds no block."""
        account = self._accounts.get(tenant)
        return () if account is None else account.orders

    def uses(self) -> list[TenantUse]:
        """Tenants that hold blocks."""
        return [
            TenantUse(
                tenant,
                account.used_bytes,
                self._limit_of(tenant) if self.is_bounded else None,
                account.refused,
                account.evicted,
            )
            for tenant, account in self._accounts.items()
            if account.used_bytes
        ]
