"""Tokens of one service account for the kubelet's credential providers (``tokenAttributes``).

The kubelet gives such a provider a token of the pod's own account. The agent pulls for no pod: it
may do so only for the account that the settings name, and with the right that the cluster gave it.
"""

from dataclasses import dataclass, field

from kube import client
from preheat import settings

ASK_SECONDS = 5.0


@dataclass(frozen=True)
class TokenAttributes:
    """What a provider wants to have. ``per_token``: its logins are good for one token only."""

    audience: str
    required: bool
    per_token: bool
    required_annotations: tuple[str, ...] = ()
    optional_annotations: tuple[str, ...] = ()


class MissingAnnotationError(Exception):
    """The account lacks an annotation without which the provider must not be asked."""


@dataclass(frozen=True)
class Grant:
    """What a provider is given."""

    token: str = field(default="", repr=False)
    annotations: tuple[tuple[str, str], ...] = ()


async def grant(asked: settings.ServiceAccountSettings, wanted: TokenAttributes) -> Grant:
    """A new token, good for an hour. Raises KubeError, MissingAnnotationError."""
    server = client.ApiServer(asked)
    path = client.path_to("/api/v1/namespaces", asked.namespace, "serviceaccounts", asked.name)
    about = f"ServiceAccount {asked.namespace}/{asked.name}"
    try:
        annotations: dict[str, object] = {}
        if wanted.required_annotations or wanted.optional_annotations:
            found = await server.request("GET", path, about=about, deadline=ASK_SECONDS)
            annotations = (found.get("metadata") or {}).get("annotations") or {}
        for key in wanted.required_annotations:
            if key not in annotations:
                raise MissingAnnotationError(f"{about} has no annotation {key}")
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [wanted.audience]},
        }
        about = f"a token of {about}"
        answer = await server.request(
            "POST", f"{path}/token", body, about=about, deadline=ASK_SECONDS
        )
    finally:
        await server.close()
    token = (answer.get("status") or {}).get("token")
    if not isinstance(token, str) or not token:
        raise client.KubeError(about, "the answer has no token")
    kept = (*wanted.required_annotations, *wanted.optional_annotations)
    given = ((key, str(annotations[key])) for key in kept if key in annotations)
    return Grant(token, tuple(given))
