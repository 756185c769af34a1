"""Stand-ins with upstream's signatures for the package FastDeploy: enough of it to import the operators of `xpu/fastdeploy`."""
