"""How tests of the lake use hypothesis."""

from hypothesis import settings

from tests.tools import EXAMPLES

# The machine that runs tests is shared: how long an example takes says nothing.
settings.register_profile("lake", deadline=None, max_examples=EXAMPLES)
settings.load_profile("lake")
