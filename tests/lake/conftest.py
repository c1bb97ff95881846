"""How tests of the lake use hypothesis."""

from hypothesis import settings

# The machine that runs tests is shared: how long an example takes says nothing.
settings.register_profile("lake", deadline=None)
settings.load_profile("lake")
