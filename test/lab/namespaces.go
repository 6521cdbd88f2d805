package lab

import (
	"net/netip"
	"slices"
)

// adopt takes in the namespace of a process that somebody else has started, in which addr is.
func (l *Lab) adopt(role string, pid int, addr netip.Addr) (*Namespace, error) {
	ns, err := namespaceOfProcess(prefix+l.ID+"-"+role, pid)
	if err != nil {
		return nil, err
	}
	ns.addrs = []netip.Addr{addr}
	l.keep(ns)
	return ns, nil
}

// keep has Close close a namespace.
func (l *Lab) keep(ns *Namespace) {
	ns.families = l.Options.families()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.namespaces = append(l.namespaces, ns)
}

// newNamespace makes a namespace that Close will close.
func (l *Lab) newNamespace(role string) (*Namespace, error) {
	ns, err := newNamespace(prefix + l.ID + "-" + role)
	if err != nil {
		return nil, err
	}
	l.keep(ns)
	// The kernel hands the machine's own value on, and a machine may forward.
	for _, family := range ns.families {
		if err := ns.WriteSysctl(Forwarding[family], "0"); err != nil {
			return ns, err
		}
	}
	return ns, nil
}

// Namespaces are all that the lab has now: its hosts, its pods and the fabric.
func (l *Lab) Namespaces() []*Namespace {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.namespaces)
}

// dropNamespace ends one namespace before the lab ends.
func (l *Lab) dropNamespace(ns *Namespace) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.namespaces, ns); i >= 0 {
		l.namespaces = slices.Delete(l.namespaces, i, i+1)
		return ns.remove()
	}
	return nil // has been dropped before
}
