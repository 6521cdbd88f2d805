// Package device wraps what the plugin and the agent need of netlink: links, addresses, routes, rules, neighbours and
// IPsec policies; VXLAN devices; and sysctls.
//
// A Handle has a socket in one network namespace, and needs no thread of its own. Dumps that the kernel interrupts are
// repeated, deleting what is already gone is success, and what does not exist is reported as ErrNotFound. Which links
// and routes should exist is for the callers to decide.
//
//	ns, err := device.OpenNetNS("/run/netns/pod")
//	host, err := device.Open()
//	link, err := host.CreateVeth(device.Veth{Name: "ec0", MAC: a, PeerName: "eth0", PeerMAC: b, PeerNS: ns, MTU: 1500})
//	err = host.SetUp(link.Index)
package device
