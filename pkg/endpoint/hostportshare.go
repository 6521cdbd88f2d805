package endpoint

import "fmt"

// HostPortShareError is returned for more host ports than a pod or its namespace may have. All numbers are of entries: a port at all
// addresses of two families has one of each.
type HostPortShareError struct {
	Asked, Free, Room int
	// Namespace is the pod's if its share is used up, which has Held entries already; Free are then those that no other namespace has.
	Namespace string
	Held      int
}

func (e *HostPortShareError) Error() string {
	asks := fmt.Sprintf("the pod asks for %d host ports (one in both families counts twice)", e.Asked)
	if e.Namespace == "" {
		return fmt.Sprintf("%s, and may have %d at most: half of those that are free on this node, %d of %d", asks, HostPortShare(e.Free), e.Free, e.Room)
	}
	return fmt.Sprintf("%s, and namespace %s, which has %d on this node, may have %d at most: half of those that no other namespace has, %d of %d",
		asks, e.Namespace, e.Held, HostPortShare(e.Free), e.Free, e.Room)
}

// HostPortShare is how many host ports a pod or a namespace may have, given how many the others leave: as many as it has that is given one
// at a time, each while it has fewer than are free.
func HostPortShare(free int) int { return (free + 1) / 2 }

// shareHostPorts fails with a *HostPortShareError when ADD asks for more host ports than the pod or its namespace may have where other
// links have so many entries. A pod keeps what it was given: the agent, which makes it again, is never refused.
func (w *Work) shareHostPorts(others map[int]int) error {
	if !w.fresh {
		return nil
	}
	room, used := int(w.Tables.HostPorts.MaxEntries()), 0
	for _, n := range others {
		used += n
	}
	e := &HostPortShareError{Asked: len(w.HostPorts), Free: room - used, Room: room}
	if e.Asked > HostPortShare(e.Free) {
		return e
	}
	namespace := NamespaceOf(w.Pod)
	if namespace == "" || e.Asked+used <= HostPortShare(e.Free) { // even if the namespace has all that are used
		return nil
	}
	list, err := List(w.StateDir)
	if err != nil {
		w.log().Warn("host ports of endpoints whose state can't be read count for no namespace", "error", err)
	}
	for _, o := range list {
		if NamespaceOf(o.Pod) == namespace {
			e.Held += others[o.HostIndex]
		}
	}
	e.Namespace, e.Free = namespace, e.Free+e.Held
	if e.Asked+e.Held > HostPortShare(e.Free) {
		return e
	}
	return nil
}
