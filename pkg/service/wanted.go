package service

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpf-cni/ebpf-cni/maps/services"
	"github.com/ebpf-cni/ebpf-cni/maps/wire"
)

// sctp is the only one of the three protocols of Services whose checksum does not follow an address.
const sctp wire.Protocol = 132

// setID says whose set it is. Backends are of the frontend's family, so a port of a Service of both families has two sets.
type setID struct {
	Name
	port     string
	protocol wire.Protocol
	family   wire.Family
}

// wantedSet is a port of a Service as the maps should have it.
type wantedSet struct {
	setID
	port      uint16
	affinity  uint32
	backends  []Backend
	frontends []frontend
	// ranges are who may use the frontends with the flag Ranges.
	ranges []netip.Prefix
}

// frontend is an address and port, or a NodePort, at which a set is found.
type frontend struct {
	services.Key
	flags services.Flags
	// clusterIP says that the address is one.
	clusterIP bool
}

// String is such as "10.96.0.1:443 tcp".
func (f frontend) String() string { return f.Frontend() + " " + f.Proto.String() }

// keys are its entries in the map services. A NodePort has none of its address, which stands for all of this node's.
func (f frontend) keys() []services.Key {
	if f.IsNodePort() {
		return []services.Key{f.Key}
	}
	return []services.Key{f.Key, {Address: f.Address}}
}

// address is one of a Service's that this node translates.
type address struct {
	wire.Addr
	clusterIP, loadBalancer bool
}

// wanted says what the maps should have of a Service, and what of it can't be served.
func wanted(s *Service, m *Model, o Options) (sets []wantedSet, problems []Problem) {
	all := m.Slices(s.Name)
	problem := func(r Reason, format string, args ...any) {
		problems = append(problems, Problem{s.Name, r, fmt.Sprintf(format, args...)})
	}
	if s.Malformed != "" {
		problem(Malformed, "%s", s.Malformed)
	}
	for _, slice := range all {
		if slice.Malformed != "" {
			problem(Malformed, "EndpointSlice %s: %s", slice.Name, slice.Malformed)
		}
	}
	addresses := byFamily(slices.DeleteFunc(addressesOf(s, o), func(a address) bool {
		if a.clusterIP {
			return false
		}
		what := nobodys(a.Netip(), o)
		if what != "" {
			problem(Unsupported, "%v is %s, which no Service may have", a.Netip(), what)
			return true
		}
		owner, other := m.otherClusterIP(a.Netip(), s.Name)
		if other {
			problem(Taken, "%v is the ClusterIP of Service %v", a.Netip(), owner)
		}
		return other
	}))
	endpoints, left, seen := byPort(all), newAllowance(o.Capacities), twins{}
	for _, p := range s.Ports {
		if reason, text := refusal(s, p, seen.has(p)); text != "" {
			problem(reason, "%s", text)
			continue
		}
		for _, family := range []wire.Family{wire.IPv4, wire.IPv6} {
			n := len(addresses[family])
			if s.answersOnNodes(p, family) {
				n++
			}
			if n == 0 || !left.admits(p, n) {
				continue
			}
			w := wantedSet{
				setID: setID{s.Name, p.Name, p.Protocol, family}, port: p.Port, affinity: s.Affinity,
				frontends: frontendsOf(s, p, family, addresses[family]), ranges: ofFamily(s.SourceRanges, family),
			}
			if left.looksAt(p, endpoints) {
				w.backends = Choose(s, p, family, endpoints, o)
			}
			w.refuse(m, o, problem)
			w.noteHostPort(o, problem)
			if len(w.frontends) > 0 {
				left.take(&w)
				sets = append(sets, w)
			}
		}
	}
	if left.refused != "" {
		problem(Unsupported, "%s", left.refused)
	}
	return sets, problems
}

// refuse takes the frontends away that can't be served, and says so.
func (w *wantedSet) refuse(m *Model, o Options, problem func(r Reason, format string, args ...any)) {
	// Nodes would lose the API server, and never hear that the Service is gone.
	w.frontends = slices.DeleteFunc(w.frontends, func(f frontend) bool {
		theirs := !f.clusterIP && m.isAPIServers(f, o)
		if theirs {
			problem(Taken, "%v is where the API server answers", f)
		}
		owner := f.guarded(o)
		if owner != "" && !theirs {
			problem(Taken, "%v is the port of %s", f, owner)
		}
		return theirs || owner != "" || w.endsAt(f, o)
	})
	if w.protocol != sctp {
		return
	}
	if text := w.keepPort(); text != "" {
		problem(Unsupported, "%s", text)
	}
}

// guarded names whose port of the node's own processes a frontend is; empty: it is none's.
func (f frontend) guarded(o Options) string {
	a := f.Address.Netip()
	if f.clusterIP || f.Proto != wire.TCP || !o.HeldAddresses[a] {
		return ""
	}
	p, _ := o.Guarded.Find(a, f.Port.Host())
	return p.Owner
}

// noteHostPort says where the NodePort does not answer on this node, since a pod has it as its host port. That was there first: no pod
// gets one that is a NodePort.
func (w *wantedSet) noteHostPort(o Options, problem func(r Reason, format string, args ...any)) {
	for _, f := range w.frontends {
		if has := o.HostPorts[f.Key]; f.IsNodePort() && has != "" {
			problem(HostPort, "the NodePort %v does not answer on this node where it is %s, which was there first; it will when that pod has gone", f, has)
		}
	}
}

// meetsOthers says whether other host ports than before are in the way of a NodePort.
func (s *Service) meetsOthers(before, now map[services.Key]string) bool {
	if len(before)+len(now) == 0 {
		return false
	}
	return slices.ContainsFunc(s.Ports, func(p Port) bool {
		return slices.ContainsFunc([]wire.Family{wire.IPv4, wire.IPv6}, func(f wire.Family) bool {
			k := services.NodePort(f, wire.PortFrom(p.NodePort), p.Protocol)
			return s.answersOnNodes(p, f) && before[k] != now[k]
		})
	})
}

// endsAt says whether what goes to a frontend is to stay there: the node's own socket has that address and port, and is an
// endpoint. Nodes might send it on to each other otherwise.
func (w *wantedSet) endsAt(f frontend, o Options) bool {
	return !f.clusterIP && f.flags&services.Ranges == 0 && o.HeldAddresses[f.Address.Netip()] &&
		slices.ContainsFunc(w.backends, func(b Backend) bool {
			return (b.Cluster || b.Local) && b.Address == f.Address && b.Port == f.Port.Host()
		})
}

// keepPort takes the frontends away whose port is not that of all backends, and says so: where it can't be changed.
func (w *wantedSet) keepPort() (text string) {
	w.frontends = slices.DeleteFunc(w.frontends, func(f frontend) bool {
		other := slices.IndexFunc(w.backends, func(b Backend) bool { return b.Port != f.Port.Host() })
		if other >= 0 && text == "" {
			text = fmt.Sprintf("port %v is SCTP and its endpoints listen on port %d: the two have to be the same", f.Port, w.backends[other].Port)
		}
		return other >= 0
	})
	return text
}

// ofFamily are the ranges of a family.
func ofFamily(ranges []netip.Prefix, family wire.Family) (of []netip.Prefix) {
	for _, r := range ranges {
		if wire.FamilyOf(r.Addr()) == family {
			of = append(of, r)
		}
	}
	return of
}

// twins are the ports that have been there, by one of number, name and NodePort each.
type twins map[Port]bool

// has says whether a port like this one has been there, and notes it.
func (t twins) has(p Port) (twin bool) {
	keys := []Port{{Protocol: p.Protocol, Port: p.Port}, {Protocol: p.Protocol, Name: "name " + p.Name}}
	if p.NodePort != 0 {
		keys = append(keys, Port{Protocol: p.Protocol, NodePort: p.NodePort})
	}
	for _, k := range keys {
		twin = twin || t[k]
		t[k] = true
	}
	return twin
}

// refusal says why a port of a Service is not served; empty when it is.
func refusal(s *Service, p Port, twin bool) (Reason, string) {
	switch {
	case p.Protocol != wire.TCP && p.Protocol != wire.UDP && p.Protocol != sctp:
		return Unsupported, fmt.Sprintf("port %d has protocol %v; TCP, UDP and SCTP can be served", p.Port, p.Protocol)
	case p.Port == 0:
		return Malformed, fmt.Sprintf("port %q has no number", p.Name)
	case max(len(s.Namespace), len(s.Name.Name), len(p.Name)) >= services.NameLen:
		return Malformed, fmt.Sprintf("a name is longer than %d characters, so port %d is left out", services.NameLen-1, p.Port)
	case twin:
		return Malformed, fmt.Sprintf("port %d %v is there twice, or its name %q or its NodePort is", p.Port, p.Protocol, p.Name)
	}
	return "", ""
}

// nobodys says what an address is that stands for no single host everywhere, such as those by which hosts ask for their own (RFC 2131);
// empty: it is none.
func nobodys(a netip.Addr, o Options) string {
	switch {
	case o.Broadcast[a] || a == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "everybody on a link"
	case a.IsMulticast():
		return "a group"
	case a.IsLoopback():
		return "each host for itself"
	case a.IsLinkLocalUnicast():
		return "another host on each link"
	case a.Is4() && a.As4()[0] == 0:
		return "a host that has no address yet"
	}
	return ""
}

// has reports whether the Service has addresses of that family: its ClusterIPs say so.
func (s *Service) has(family wire.Family) bool {
	return slices.ContainsFunc(s.ClusterIPs, func(a netip.Addr) bool { return wire.FamilyOf(a.Unmap()) == family })
}

// addressesOf lists the addresses of a Service that this node translates, each once. A ClusterIP that the node itself holds is
// not among them: whoever listens there gets the packets. Nor is an address of a family that the Service does not have, such as a node's
// other address in the status of a load balancer: it has no backends there.
func addressesOf(s *Service, o Options) (all []address) {
	seen := map[netip.Addr]bool{}
	add := func(addresses []netip.Addr, kind address) {
		for _, a := range addresses {
			a = a.Unmap()
			if !a.IsValid() || a.IsUnspecified() || seen[a] || !s.has(wire.FamilyOf(a)) {
				continue
			}
			seen[a] = true
			if kind.Addr = wire.AddrFrom(a); !kind.clusterIP || !o.HeldAddresses[a] {
				all = append(all, kind)
			}
		}
	}
	add(s.ClusterIPs, address{clusterIP: true})
	add(s.LoadBalancerIPs, address{loadBalancer: true}) // before externalIPs: not everybody may ask what is both
	if o.ExternalIPs {
		add(s.ExternalIPs, address{})
	}
	return all
}

func byFamily(all []address) map[wire.Family][]address {
	of := map[wire.Family][]address{}
	for _, a := range all {
		family := wire.FamilyOf(a.Netip())
		of[family] = append(of[family], a)
	}
	return of
}

// answersOnNodes says whether a port has a NodePort in a family: one that the Service has.
func (s *Service) answersOnNodes(p Port, family wire.Family) bool {
	return p.NodePort != 0 && s.has(family)
}

// frontendsOf are those of a port in one family, of which these are the addresses.
func frontendsOf(s *Service, p Port, family wire.Family, addresses []address) (all []frontend) {
	for _, a := range addresses {
		f := frontend{Key: services.Key{Address: a.Addr, Port: wire.PortFrom(p.Port), Proto: p.Protocol}, clusterIP: a.clusterIP}
		if a.clusterIP && s.InternalLocal {
			f.flags |= services.Local
		}
		if !a.clusterIP && s.ExternalLocal {
			f.flags |= services.ExternalLocal
		}
		if a.loadBalancer && s.SourceRanges != nil {
			f.flags |= services.Ranges
		}
		all = append(all, f)
	}
	if s.answersOnNodes(p, family) {
		f := frontend{Key: services.NodePort(family, wire.PortFrom(p.NodePort), p.Protocol)}
		if s.ExternalLocal {
			f.flags = services.ExternalLocal
		}
		all = append(all, f)
	}
	return all
}

func compareKeys(a, b services.Key) int {
	return cmp.Or(slices.Compare(a.Address[:], b.Address[:]), slices.Compare(a.Port[:], b.Port[:]), cmp.Compare(a.Proto, b.Proto))
}

func compareRanges(a, b services.RangeKey) int {
	return cmp.Or(cmp.Compare(a.Set, b.Set), slices.Compare(a.Source[:], b.Source[:]), cmp.Compare(a.PrefixLen, b.PrefixLen))
}

// record is what the map of names has of a set.
func (w wantedSet) record() services.ServiceName {
	r := services.ServiceName{Port: wire.PortFrom(w.port), Proto: w.protocol}
	copy(r.Namespace[:], w.Namespace)
	copy(r.Name[:], w.Name.Name)
	copy(r.PortName[:], w.setID.port)
	return r
}
