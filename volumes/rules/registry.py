"""The one place where rules are listed. A new rule is one new module and one line here."""

from volumes.rules import (
    attachment,
    blocklisted_client,
    busy_mount,
    cluster_health,
    guard_state,
    leaked_mount,
    mapped_elsewhere,
    mapped_twice,
    mapped_unmounted,
    mount_options,
    network,
    propagation,
    read_only_claim,
    unmap_failing,
    unread_log,
    version_skew,
)
from volumes.rules.base import Rule

RULES: tuple[Rule, ...] = (
    leaked_mount.RULE,
    busy_mount.RULE,
    propagation.RULE,
    mapped_unmounted.RULE,
    unmap_failing.RULE,
    mapped_twice.RULE,
    mapped_elsewhere.RULE,
    blocklisted_client.RULE,
    read_only_claim.RULE,
    attachment.RULE,
    mount_options.RULE,
    guard_state.LEDGER,
    guard_state.ENFORCING,
    version_skew.VERSIONS,
    version_skew.FEATURE,
    cluster_health.CLOCK,
    cluster_health.NEAR_FULL,
    network.MTU,
    network.MESSENGER,
    unread_log.RULE,
)
BY_NAME = {rule.name: rule for rule in RULES}
