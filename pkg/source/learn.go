package source

import (
	"net/netip"
	"slices"
	"strings"
)

// mostLearnt is how many addresses of API servers are learnt.
const mostLearnt = 16

// usable are the addresses of those that were learnt that can be used: by the protocol of the configuration, each once.
func (v *Servers) usable(addresses []string) (all []string) {
	for _, text := range addresses {
		at, err := ParseServer(text)
		if err == nil && len(all) < mostLearnt && !slices.Contains(all, at) && at != v.baseAddress() && strings.HasPrefix(at, v.base.Scheme+":") {
			all = append(all, at)
		}
	}
	return all
}

// Learn takes the addresses at which the API server's Service has its endpoints. None is no news: without any nobody could say so.
func (v *Servers) Learn(addresses []netip.AddrPort) {
	if v == nil || !v.learns() || len(addresses) == 0 {
		return
	}
	texts := make([]string, len(addresses))
	for n, a := range addresses {
		texts[n] = serverAt(v.base.Scheme, a.Addr().String(), a.Port())
	}
	slices.Sort(texts)
	v.take(v.usable(texts))
}

// take has instances for these addresses. What is in use stays until another one is, as the last resort.
func (v *Servers) take(addresses []string) {
	v.choosing.Lock() // nobody is to choose one of those that go
	defer v.choosing.Unlock()
	v.mu.Lock()
	defer v.mu.Unlock()
	if sameServers(addresses, v.own()) {
		return
	}
	all, err := v.instances(append(slices.Clone(addresses), v.baseAddress()))
	if err != nil { // such as of a file of the configuration that can't be read
		v.options.Log.Warn("the API server's own addresses can't be used", "error", err)
		return
	}
	for _, i := range v.all {
		switch {
		case slices.Contains(all, i):
		case i == v.inUse:
			i.lastResort, v.leaving = true, true
			all = append(all, i)
		default:
			i.connections.CloseAll()
		}
	}
	if len(v.all) == 1 {
		v.inUse = v.all[0] // by which they have become known
	}
	v.all = all
}

// own are the addresses that are no last resort. The caller holds the lock.
func (v *Servers) own() (all []string) {
	for _, i := range v.all {
		if !i.lastResort {
			all = append(all, i.String())
		}
	}
	return all
}

// forgetLeaving forgets what is only kept because it was in use. The caller holds the lock.
func (v *Servers) forgetLeaving() {
	v.all = slices.DeleteFunc(slices.Clone(v.all), func(i *instance) bool {
		return i.lastResort && i != v.inUse && i.String() != v.baseAddress()
	})
}

// save has those addresses kept that have worked, if they are others than are kept.
func (v *Servers) save() {
	v.mu.Lock()
	var worked []string
	for _, i := range v.all {
		if i.worked && !i.lastResort {
			worked = append(worked, i.String())
		}
	}
	same := sameServers(worked, v.kept)
	v.mu.Unlock()
	if same || len(worked) == 0 || v.options.Keep == nil || v.options.Keep(worked) != nil { // which has been said, and is tried again
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.kept = worked
}
