"""CUDA and CPU behind one interface."""
