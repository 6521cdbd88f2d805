// Package service decides what the maps of Services contain: from Services and
// EndpointSlices, plain values, to frontends, sets and backends.
//
// Which endpoints serve is a function of the objects and of this node's name and
// zone (choice.go). Which numbers the maps give them, and what has to be written
// where, is another (state.go), which a restarted agent feeds with what stands
// in the maps already. Neither touches the kernel or asks for the time.
package service

import (
	"net/netip"
	"time"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// Name names an object of the API.
type Name struct {
	Namespace, Name string
}

// Service is what is kept of a Service object that this node serves. Sources leave out headless ones, ExternalName, and
// those that a label gives to somebody else.
type Service struct {
	Name
	// Created is the creationTimestamp: of two Services with one address and port the older keeps it.
	Created time.Time
	// ClusterIPs, ExternalIPs and LoadBalancerIPs are its addresses. Of a load balancer only those with ipMode VIP.
	ClusterIPs, ExternalIPs, LoadBalancerIPs []netip.Addr
	Ports                                    []Port
	// SourceRanges are who may ask its load balancer: nobody else if it is not nil.
	SourceRanges []netip.Prefix
	// HealthCheckPort is the healthCheckNodePort; 0: it has none.
	HealthCheckPort uint16
	// InternalLocal and ExternalLocal say that a traffic policy is Local.
	InternalLocal, ExternalLocal bool
	// Affinity is for how many seconds a client keeps its backend; 0: it does not.
	Affinity uint32
	// Malformed says what of the object could not be read; empty when all could.
	Malformed string
}

// Port is a port of a Service.
type Port struct {
	Name     string
	Protocol wire.Protocol
	Port     uint16
	NodePort uint16
}

// Slice is what is kept of an EndpointSlice.
type Slice struct {
	Name
	// Service is the name of the Service whose endpoints they are, in the same namespace.
	Service   string
	Ports     []SlicePort
	Endpoints []Endpoint
	// Malformed says what of the object could not be read; empty when all could.
	Malformed string
}

// SlicePort is a port of all endpoints of a slice; its name is that of the Service's port.
type SlicePort struct {
	Name     string
	Protocol wire.Protocol
	Port     uint16
}

// Endpoint is one endpoint, with the conditions as the API defines them: one that is missing has the value that it stands for.
type Endpoint struct {
	// Address is the first of addresses, the only one that has a meaning.
	Address                     netip.Addr
	Ready, Serving, Terminating bool
	// Node and Zone are empty where the endpoint has none.
	Node, Zone string
	// ForZones and ForNodes are its hints.
	ForZones, ForNodes []string
}
