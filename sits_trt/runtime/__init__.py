"""From requests to tokens: scheduling, tiles, sampling and the executor thread. Import the module that you need."""
