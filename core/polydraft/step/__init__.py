"""One step on the device: uploads, the runner with its programs, captured graphs."""
