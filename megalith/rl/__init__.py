"""Training on what a model has generated: objectives, advantages, rollouts, and the runs made of them."""
