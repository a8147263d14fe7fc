"""What a node is, as it says itself: `probe` asks by `facts_script`, which runs there; `answer` and the parsers beside
it read what was said, as pure functions; `topology` puts the nodes together. Telemetry and discovery live here too.
Nothing here judges: that is preflight's and planning's."""
