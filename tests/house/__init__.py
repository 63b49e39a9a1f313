"""The house rules as checkers: functions from a source tree to the list of its breaches.

Driven by the syntax tree alone, so they take well under a second and import neither torch nor meshwright.
`tests/test_house.py` runs them on this repository; the tests here feed them seeded breaches.
"""
