// Package lab builds a cluster out of network namespaces on one machine, for end-to-end tests, the demo and the
// benchmark. It needs root and nothing but the kernel: no iproute2, no container runtime, no Kubernetes.
//
//	               outside 203.0.113.10
//	                  |
//	            [ router 172.18.0.1 ]            only with Options.Router
//	                  |
//	fabric   ---+-----+-------+-------------+    a bridge in a namespace of its own, 172.18.0.0/24
//	            |             |             |
//	        172.18.0.11   172.18.0.12   172.18.0.13
//	          k8s-n1        k8s-n2        k8s-n3      real agent, own bpffs, own directories
//	          |    |        |    |        |    |
//	         pod  pod      pod  pod      pod  pod     plugged in by the real plugin through libcni
//
// The addresses are those of IPv4, which a lab has unless Options.Families say otherwise; those of IPv6 look alike:
// fd00:172:18::11 is k8s-n1, its pods are in fd00:10:244:0::/64, and 2001:db8:203:113::10 is the outside host.
//
// Nothing of it is wired to the machine's own interfaces: every link is born inside the lab's namespaces, and the lab's
// default routes end at the outside host. Where a test asks for them, a real etcd-server and a real dockerd run in it.
//
// Several labs can run at once. Each has an id, which is part of its namespaces' names, and a directory
// /run/ebpf-cni-lab/ID that holds all its files and a lock. The lock is free once the owner is dead, however it died;
// New and Sweep end such labs first, but not those that were kept on purpose: SweepKept and End do that. What stays for
// good are the two empty directories, /run/netns a mount point as after the first `ip netns add`.
//
//	func TestPodsTalk(t *testing.T) {
//		l := lab.ForTest(t, lab.Options{Nodes: 2})
//		if err := l.StartAgents(t.Context()); err != nil {
//			t.Fatal(err)
//		}
//		a, err := l.Nodes[0].AddPod(t.Context(), "a", lab.PodOptions{})
//		...
//		server, err := b.Serve(8080)
//		seen, err := a.TCP(t.Context(), netip.AddrPortFrom(b.Addr(), server.Port))
//	}
//
// The package builds and observes; what has to hold is for its users to say.
package lab
