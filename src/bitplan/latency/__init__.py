"""Networks timed layer by layer in the runtime that will execute them."""
