"""hypothesis as tests use it; for them alone, since it takes long to import."""

from hypothesis import HealthCheck, given, settings, strategies as st

__all__ = ["HealthCheck", "given", "settings", "st"]

# Its limits of time (0.2 s for an example) are those of a machine with nothing else to
# do.
settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")
