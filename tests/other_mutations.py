"""Mistakes that no case of the conformance suite can see, for ``mutations.py``.

Each is the test that must fail, a name, a file, texts and what replaces them.
"""

STRATEGIES = "tests/parallel/test_strategies.py::"
ENGINES = "tests/parallel/test_engines.py::test_one_device_of_jax"

MUTATIONS = (
    # calls over many ranks
    (STRATEGIES + "test_numbers_from_the_host_go_where_the_query_is[mask1]",
     "facts in place of arrays", "polyattn/parallel/call.py",
     "describe(*arrays.values(), **options, facts=_facts)",
     "describe(*map(facts_of, arrays.values()), **options, facts=_facts)"),
    (STRATEGIES + "test_what_each_rank_may_choose_and_how_it_spells_a_number_are_no_difference",
     "a rank's own kernel taken for a difference", "polyattn/parallel/agreement.py",
     'OWN = {"backend", "kernel"}', 'OWN = {"backend"}'),
    (STRATEGIES + "test_the_error_of_calls_that_differ_says_what_differs_on_which_ranks",
     "calls of ranks not compared", "polyattn/parallel/agreement.py",
     "if len(set(digests)) == 1:", "if len(digests) == ranks.size:"),
    (ENGINES + "[check_options_of_another_axis-gather]",
     "mesh axes of options forgotten", "polyattn/parallel/jax_vjp.py",
     "for array in (*arrays, *others)]", "for array in arrays]"),
    (ENGINES + "[check_options_of_another_axis-decode]",
     "the whole gradient of an array that each device has", "polyattn/parallel/jax_vjp.py",
     "    axes = set(_axes(array) - _axes(gradient))", "    axes: set[str] = set()"),
)  # fmt: skip
