"""Other systems' front doors: each turns what a user of that system types into a RunConfig."""
