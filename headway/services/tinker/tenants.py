"""Tenants: their keys and scopes, quotas, and the account of what they used and waited for."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headway.config.services.tinker import TinkerConfig
from headway.control.cost import TokenPrices
from headway.control.tenant_shares import DeficitRoundRobin
from headway.generator.endpoint.errors import HttpError
from headway.generator.recording.sessions import KeyRefused
from headway.planner.catalogue.read import Catalogue
from headway.planner.costs import price_of
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.tenants.protocols import TenantRefused
from headway.services.serve_metrics import ServiceMetrics, labelled, response_family
from headway.services.tinker.log import Effect, LoggedAccount, TinkerLog

ANYONE = "default"  # the tenant of all requests, where there is no file of keys
SCOPES = ("train", "sample", "operate")
_QUEUED_TOKENS = 8_000_000  # of a tenant's requests without a reply; more have to wait
_GIGABYTE = 10**9
REQUEST_TOKENS = 64  # that a request counts at least, and that a tenant's turn is worth
_USES = ("prefilled_tokens", "sampled_tokens", "trained_tokens", "device_s")


class TooManyRequests(HeadwayError):
    """A model, sampler or tenant has too many requests without a reply."""


class TenantKeys:
    """The keys of tenants, kept as digests, with what each may do: train, sample, or operate (see all tenants)."""

    def __init__(self, file: str) -> None:
        """Read a file with NAME SCOPES DIGEST in each line; "": every key is accepted. Raises ConfigurationError."""
        self._tenants: list[tuple[str, str, tuple[str, ...]]] = []
        if not file:
            return
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"tinker.keys = {file!r}: {error}") from None
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                self._add(line.split(), f"{file}, line {number}")
        if not self._tenants:
            raise ConfigurationError(f"tinker.keys = {file!r}: it has no key; valid: lines NAME SCOPES SHA-256")

    def _add(self, words: list[str], origin: str) -> None:
        scopes = tuple(words[1].split(",")) if len(words) == 3 else ()
        form_fits = len(words) == 3 and re.fullmatch(r"[\w.\-]+", words[0]) and re.fullmatch("[0-9a-f]{64}", words[2])
        if not form_fits or not set(scopes) <= set(SCOPES):
            raise ConfigurationError(
                f"{origin}: valid: NAME SCOPES DIGEST, scopes of {','.join(SCOPES)}, and a digest of a key that begins "
                "with tml-, as printf %s KEY | sha256sum prints it"
            )
        self._tenants.append((words[2], words[0], scopes))

    def tenant_of(self, key: str, scope: str = "") -> str:
        """Return the name of a key's tenant. Raises KeyRefused, and HttpError 403 for a key without the ``scope``."""
        if not self._tenants:
            return ANYONE
        key_digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        matches = [entry for entry in self._tenants if hmac.compare_digest(entry[0], key_digest)]
        if not matches:
            raise KeyRefused("incorrect API key provided" if key else "no API key: set TINKER_API_KEY")
        _, tenant, scopes = matches[0]
        if scope and scope not in scopes:
            raise HttpError(403, f"this key of {tenant} may {' and '.join(scopes)}: valid: one that may {scope}")
        return tenant


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the devices by a request."""

    prefilled_tokens: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    device_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Return the sum of all tokens."""
        return self.prefilled_tokens + self.sampled_tokens + self.trained_tokens


class _Activity:
    """Open requests of a tenant, and its sums since the service's start."""

    def __init__(self, now_s: float) -> None:
        self.open: dict[tuple[str, int], tuple[int, float]] = {}  # by scope and sequence: tokens, and when it came
        self.idle_since_s: float | None = now_s  # None: it has open requests
        self.client_s = 0.0  # in which it had none: the service waited for the client
        self.queued_s = 0.0  # waits of its requests for their turns
        self.lag_tokens = self.lagging_tokens = self.most_lag = 0  # steps x tokens, tokens, most steps


class SampleAdmissions:
    """Admits sample requests to the engines, tenants in turn by tokens, up to a number of samples at once."""

    def __init__(self, limit: int) -> None:
        self._turns = DeficitRoundRobin[tuple[int, int, asyncio.Event]](REQUEST_TOKENS)
        self._admitted, self._limit = 0, limit  # samples

    def charge(self, tenant: str, tokens: int) -> None:
        """Charge a tenant for tokens beside those of its turns; negative: for fewer."""
        self._turns.charge(tenant, tokens)

    @asynccontextmanager
    async def turn(self, tenant: str, samples: int, tokens: int) -> AsyncIterator[None]:
        """Have so many samples at the engines inside the block, from the tenant's turn on, for at most ``tokens``."""
        admitted = asyncio.Event()
        self._turns.add(tenant, (samples, tokens, admitted))
        self._admit()
        try:
            await admitted.wait()
            yield
        finally:
            if admitted.is_set():
                self._admitted -= samples
            admitted.set()  # one that is cancelled before its turn is passed over
            self._admit()

    def _admit(self) -> None:
        while self._admitted < self._limit and (turn := self._turns.take()) is not None:
            tenant, (samples, tokens, admitted) = turn
            if not admitted.is_set():
                self._turns.charge(tenant, max(tokens, REQUEST_TOKENS))
                self._admitted += samples
                admitted.set()


class TenantAccounts:
    """Quotas of tenants, which refuse by name and say until when; durable sums of what they used, committed with the
    replies; waits of both sides, and the staleness of samples that were trained on, since the service's start."""

    def __init__(self, log: TinkerLog, settings: TinkerConfig, now: Callable[[], float]) -> None:
        """``now``: monotonic. Raises ConfigurationError for unknown ``prices``."""
        self.open_models: Callable[[str], int] = lambda tenant: 0  # models of a tenant's living sessions
        self._log, self._settings, self._now = log, settings, now
        self._activities: defaultdict[str, _Activity] = defaultdict(lambda: _Activity(now()))
        self._dollars = _pricing(settings.prices)

    # --- quotas -------------------------------------------------------------------------------------------------------

    def require_model(self, tenant: str) -> None:
        """Raise TenantRefused if the tenant has as many models as it may."""
        limit = self._settings.models_per_tenant
        if self.open_models(tenant) >= limit:
            raise TenantRefused(
                f"{tenant} has {limit} models, the quota (models_per_tenant): valid: again when one of its sessions "
                f"has ended, by finish or {self._settings.session_timeout_s:.0f} s after its client's last sign of life"
            )

    def require_store(self, tenant: str) -> None:
        """Raise TenantRefused if the tenant's checkpoints fill its part of the store."""
        kept = self._log.all("checkpoints", "tenant = ?", (tenant,))
        if (kept_bytes := sum(checkpoint.bytes for checkpoint in kept)) >= self._settings.store_gb * _GIGABYTE:
            expiries = [checkpoint.expires_s for checkpoint in kept if checkpoint.expires_s is not None]
            time = datetime.datetime.fromtimestamp(min(expiries), datetime.UTC).isoformat() if expiries else ""
            raise TenantRefused(
                f"{tenant} keeps {kept_bytes / _GIGABYTE:.2f} GB of checkpoints, and store_gb is "
                f"{self._settings.store_gb:g}: valid: again when some are deleted"
                + (f", or when the next one expires, at {time}" if time else "")
            )

    # --- requests -----------------------------------------------------------------------------------------------------

    def arrive(self, tenant: str, key: tuple[str, int], tokens: int, *, refusable: bool) -> None:
        """Note a request that came. Raises TooManyRequests beyond the tenant's queued tokens, if it may be refused."""
        activity, now_s = self._activities[tenant], self._now()
        queued_tokens = sum(open_tokens for open_tokens, _ in activity.open.values())
        if refusable and queued_tokens and queued_tokens + tokens > _QUEUED_TOKENS:
            raise TooManyRequests(
                f"{tenant} has {queued_tokens} tokens in requests without a reply, and may have {_QUEUED_TOKENS}: "
                "valid: again when some of them have their replies"
            )
        if activity.idle_since_s is not None:
            activity.client_s, activity.idle_since_s = activity.client_s + now_s - activity.idle_since_s, None
        activity.open[key] = tokens, now_s

    def begin(self, tenant: str, key: tuple[str, int]) -> None:
        """Note that a request's turn came."""
        activity = self._activities[tenant]
        if (entry := activity.open.get(key)) is not None:
            activity.queued_s += self._now() - entry[1]
            activity.open[key] = entry[0], self._now()

    def depart(self, tenant: str, key: tuple[str, int]) -> None:
        """Note that a request has its reply, or was refused when it came."""
        activity = self._activities[tenant]
        activity.open.pop(key, None)
        if not activity.open and activity.idle_since_s is None:
            activity.idle_since_s = self._now()

    def note_lags(self, tenant: str, lags: list[tuple[int, int]]) -> dict[str, float]:
        """Note samples that a pass has: (steps since their sampler's weights, tokens) of each; returns its metrics."""
        tokens = sum(count for _, count in lags)
        if not tokens:
            return {}
        activity, most_lag = self._activities[tenant], max(lag for lag, _ in lags)
        lag_tokens = sum(lag * count for lag, count in lags)
        activity.lag_tokens += lag_tokens
        activity.lagging_tokens += tokens
        activity.most_lag = max(activity.most_lag, most_lag)
        return {"staleness_steps:mean": lag_tokens / tokens, "staleness_steps:max": float(most_lag)}

    def charge(self, tenant: str, usage: Usage) -> Effect:
        """Return the effect that adds to a tenant's account, to be committed with the reply."""
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in _USES)
        row = f"(id, {', '.join(_USES)}) VALUES (?, ?, ?, ?, ?)"
        return f"INSERT INTO accounts {row} ON CONFLICT (id) DO UPDATE SET {sums}", (
            tenant,
            *(getattr(usage, name) for name in _USES),
        )

    # --- reports ------------------------------------------------------------------------------------------------------

    def rows(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """Return the account of a tenant; None: of all."""
        accounts = {account.id: account for account in self._log.all("accounts")}
        names = sorted({*accounts, *self._activities}) if tenant is None else [tenant]
        return [self._row(name, accounts.get(name, LoggedAccount(id=name)), self._activities[name]) for name in names]

    def _row(self, tenant: str, account: LoggedAccount, activity: _Activity) -> dict[str, Any]:
        now_s, checkpoints = self._now(), self._log.all("checkpoints", "tenant = ?", (tenant,))
        idle_s = 0.0 if activity.idle_since_s is None else now_s - activity.idle_since_s
        return {
            "tenant": tenant,
            "open_models": self.open_models(tenant),
            "open_requests": len(activity.open),
            "queued_tokens": sum(tokens for tokens, _ in activity.open.values()),
            "store_bytes": sum(checkpoint.bytes for checkpoint in checkpoints),
            **{name: getattr(account, name) for name in _USES},
            "dollars": self._dollars(account),
            "queued_s": activity.queued_s,
            "client_s": activity.client_s + idle_s,
            "staleness_mean_steps": activity.lag_tokens / activity.lagging_tokens if activity.lagging_tokens else None,
            "staleness_max_steps": activity.most_lag if activity.lagging_tokens else None,
        }


class TinkerMetrics(ServiceMetrics):
    """Metrics of the service: responses, its own counts, and every tenant's account."""

    def __init__(
        self,
        responses: Mapping[tuple[str, int], int],
        counts: Mapping[str, float],
        gauges: Mapping[str, float],
        rows: list[dict[str, Any]],
    ) -> None:
        """``responses``: by route and status. ``rows``: of `TenantAccounts.rows`."""
        self._responses, self._counts, self._gauges, self._rows = responses, counts, gauges, rows

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield response_family("headway_tinker_responses", self._responses)
        events = CounterMetricFamily("headway_tinker_events", "requests and faults", labels=["event"])
        yield labelled(events, (([name], count) for name, count in sorted(self._counts.items())))
        for name, number in sorted(self._gauges.items()):
            yield GaugeMetricFamily(f"headway_tinker_{name}", f"{name.replace('_', ' ')} now", number)
        for name in self._rows[0] if self._rows else ():
            family = GaugeMetricFamily(
                f"headway_tinker_tenant_{name}", "of a tenant: see GET /tenants", labels=["tenant"]
            )
            if name != "tenant":
                yield labelled(family, (([row["tenant"]], row[name]) for row in self._rows if row[name] is not None))


def _pricing(prices: str) -> Callable[[LoggedAccount], float | None]:
    """Return what prices an account in dollars: by a service's tokens, by device hours, or not at all (None)."""
    if not prices:
        return lambda account: None
    catalogue = Catalogue.read()
    if prices.startswith("services."):
        tokens = catalogue.entry("services", prices.partition(".")[2], TokenPrices)
        return lambda account: (
            (
                account.prefilled_tokens * tokens.prefill_usd_per_mtok
                + account.sampled_tokens * tokens.sample_usd_per_mtok
                + account.trained_tokens * (tokens.train_usd_per_mtok or 0.0)
            )
            / 1e6
        )
    usd_per_hour = price_of(catalogue, prices)
    return lambda account: account.device_s / 3600 * usd_per_hour
