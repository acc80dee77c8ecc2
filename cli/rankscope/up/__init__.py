"""The parts of `rankscope up`: what is started, with which configuration and ports, and how it is kept running."""
