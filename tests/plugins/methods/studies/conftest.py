from small_study import beside_the_network, study, swept, write  # noqa: F401
