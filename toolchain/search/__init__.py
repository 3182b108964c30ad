"""The cheapest mix of formats within a budget, by measured sensitivities and an exact integer program."""
