// Package cluster makes a real Kubernetes cluster on one computer, without Docker, a registry or the Internet: etcd, the
// control plane, and nodes with containerd, runc, kubelet, kube-proxy and this project's agent and plugin.
//
//	world 203.0.113.1
//	   [ fabric 172.30.0.1 ]
//	      |             |
//	   node-1        node-2       172.30.0.11, 172.30.0.12
//	   control plane
//
// Those of IPv6, where Options.Families have it, look alike: 2001:db8:113::1, fd00:172:30::1, fd00:172:30::b.
// Every node is a machine of its own: network, mounts, processes, host name, IPC and cgroups. Nothing is wired to the real
// machine's interfaces, nothing changes its settings. A cluster ends with the process that made it unless it is kept;
// what a killed process leaves (cgroups, files), the next New sweeps.
package cluster
