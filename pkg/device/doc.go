// Package device is netlink in verbs: the links, addresses, routes, neighbours and sysctls that the plugin and the
// agent need, and nothing else of netlink.
//
// Everything is asked of a Handle, whose socket lives in one network namespace; a Handle needs no thread of its own.
// Dumps that the kernel interrupts are repeated, deleting what is already gone is success, and what does not exist is
// reported as ErrNotFound. The package decides nothing: which route or link should exist is its callers' business.
//
//	ns, err := device.OpenNetNS("/run/netns/pod")
//	host, err := device.Open()
//	link, err := host.CreateVeth(device.Veth{Name: "ec0", MAC: a, PeerName: "eth0", PeerMAC: b, PeerNS: ns, MTU: 1500})
//	err = host.SetUp(link.Index)
package device
