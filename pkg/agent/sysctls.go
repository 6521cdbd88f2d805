package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpf-cni/ebpf-cni/maps/wire"
	"github.com/ebpf-cni/ebpf-cni/pkg/device"
	"github.com/ebpf-cni/ebpf-cni/pkg/plan"
)

const (
	ipForward     = "net/ipv4/ip_forward"
	reservedPorts = "net/ipv4/ip_local_reserved_ports"
	// ephemeralPorts is the range that the kernel takes ports from for sockets that ask for any, in both families.
	ephemeralPorts = "net/ipv4/ip_local_port_range"
	// ipv6Forward alone decides on forwarding in IPv6; the links' own make routers or hosts of them.
	ipv6Forward = "net/ipv6/conf/all/forwarding"
)

// Values of accept_ra: a link follows router advertisements unless it is a router's, or in any case.
const followAsHost, followAlways = 1, 2

func acceptRAOf(link string) string { return "net/ipv6/conf/" + link + "/accept_ra" }

// Values of rp_filter (Documentation/networking/ip-sysctl.rst): a source is accepted if it is on the way back, or if there is any
// route to it. The stricter one of a link's own value and that of all links is in force, but for the loose one, which always wins.
const strictRPFilter, looseRPFilter = 1, 2

func rpFilterOf(link string) string { return "net/ipv4/conf/" + link + "/rp_filter" }

func forwardingOf(link string) string { return "net/ipv4/conf/" + link + "/forwarding" }

// maxValue is how much of a value is logged: thousands of ports are a long list.
const maxValue = 200

// settledAfter is for how long a sysctl must have been left alone until nobody is said to fight over it.
const settledAfter = time.Minute

// sysctls keeps the few settings of the host that the dataplane needs.
type sysctls struct {
	*node
	device.Sysctl
	record *record
	// forwarding says of which links, and of all, it was on after the newest pass.
	forwarding map[int]bool
	// routing says that this process has found it on in IPv6, or turned it on.
	routing bool
	// disputed are the sysctls that somebody else has changed within settledAfter, with when he last did.
	disputed map[string]time.Time
	// ports and ephemeral are reservedPorts and ephemeralPorts, kept open since nothing tells of a change; kept is what they were when
	// they last were as they should be, with those ports in use.
	ports, ephemeral *device.OpenSysctl
	kept             struct {
		ports, ephemeral string
		used             ports
	}
}

func newSysctls(n *node, r *record) *sysctls {
	return &sysctls{node: n, Sysctl: device.Sysctl{Dir: n.cfg.ProcSys}, record: r, disputed: map[string]time.Time{}}
}

func (c *sysctls) close() {
	if c != nil {
		c.ports.Close()
		c.ephemeral.Close()
	}
}

// ensure gives a sysctl a value, and remembers what it had before us. held says that it had ours when last seen.
func (c *sysctls) ensure(name string, value int, held bool) error {
	have, err := c.Get(name)
	want := strconv.Itoa(value)
	if err != nil || have == want {
		return err
	}
	before := have
	if known, again := c.record.Sysctls[name]; again {
		before = known.Before
	}
	return c.change(name, have, setting{Before: before, Ours: want}, held)
}

// change sets a value once the record has what was there before. held says that somebody else has changed it since it was right.
func (c *sysctls) change(name, have string, to setting, held bool) error {
	if err := c.record.note(name, to); err != nil {
		return fmt.Errorf("sysctl %s is %q and stays so: %w", name, have, err)
	}
	if _, err := c.Set(name, asLine(to.Ours)); err != nil {
		return err
	}
	if !held || !c.dispute(name) {
		c.log.Info("sysctl set", "name", name, "value", shorten(to.Ours, maxValue), "was", shorten(have, maxValue))
	}
	return nil
}

// dispute notes that somebody else has changed what was right. It reports whether he does so again and again, of which it
// complains: whatever needs the sysctl is broken each time for a moment.
func (c *sysctls) dispute(name string) (again bool) {
	_, again = c.disputed[name]
	c.disputed[name] = c.complaints.now()
	c.status.repaired(repairedSysctl, 1)
	if again {
		c.complaints.warn("sysctls/"+name, errors.New(
			"somebody else changes this sysctl again and again, and the agent changes it back: look for it in /etc/sysctl.d, or for who writes it with auditctl"))
	}
	return again
}

// settle ends the complaints about those that have been left alone.
func (c *sysctls) settle() {
	for name, at := range c.disputed {
		if c.complaints.now().Sub(at) >= settledAfter {
			delete(c.disputed, name)
			c.complaints.note("sysctls/"+name, nil)
		}
	}
}

// forward turns forwarding on where the look has found it off: of all links, which turns it on for each of them, and of
// uplinks. The kernel tells when it is turned off.
func (c *sysctls) forward(s *state) error {
	settings, on := s.view.settings, map[int]bool{}
	var errs []error
	turnOn := func(index int, name string) {
		var err error
		if settings[index].Forwarding != 1 {
			err = c.ensure(name, 1, c.forwarding[index])
		}
		on[index] = err == nil
		if !errors.Is(err, fs.ErrNotExist) || index == device.AllLinks { // else the link is gone meanwhile
			errs = append(errs, err)
		}
	}
	if turnOn(device.AllLinks, ipForward); settings[device.AllLinks].Forwarding != 1 && on[device.AllLinks] {
		for index, of := range settings {
			of.Forwarding = 1
			settings[index] = of
		}
	}
	for _, l := range s.view.uplinks {
		turnOn(int(l.Index), forwardingOf(l.Name))
	}
	c.forwarding = on
	return errors.Join(errs...)
}

// lacks are the families that the kernel does not have.
func (c *sysctls) lacks() (none plan.FamilySet) {
	_, err := c.Get(ipv6Forward)
	none[wire.IPv6] = errors.Is(err, fs.ErrNotExist)
	return none
}

// route makes a router of the node in IPv6 where it has a podCIDR of that. The kernel forgets then what router advertisements have
// told it, and listens to no more of them, but for the links on which that is to be kept: so those come first.
func (c *sysctls) route(s *state) error {
	if !s.plan.Standing.PodCIDR(wire.IPv6).IsValid() || !s.view.used[wire.IPv6] {
		return nil
	}
	have, err := c.Get(ipv6Forward)
	if _, ours := c.record.Sysctls[ipv6Forward]; err == nil && (ours || have == "0") { // else it has been a router before
		err = c.followRouters(s.view)
	}
	if err == nil {
		err = c.ensure(ipv6Forward, 1, c.routing)
	}
	c.routing = err == nil
	if len(s.plan.PodCIDRs) == 1 && s.plan.PodCIDRs[0].Addr().Is6() {
		return hinder(err)
	}
	return err
}

// followRouters has those links go on with router advertisements that have followed them.
func (c *sysctls) followRouters(v *view) error {
	var errs []error
	for _, link := range v.hostLinks() {
		name := acceptRAOf(link)
		have, err := c.Get(name)
		_, ours := c.record.Sysctls[name]
		if err == nil && have == strconv.Itoa(followAsHost) {
			err = c.ensure(name, followAlways, ours)
		}
		if !errors.Is(err, fs.ErrNotExist) { // else the link is gone meanwhile
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// hostLinks are those by which this node may learn of a router: the uplinks, what such routes lead over, and hardware, which without a
// router becomes no uplink: a network card may come when the node forwards already.
func (v *view) hostLinks() []string {
	names := map[string]bool{}
	for _, l := range v.uplinks {
		names[l.Name] = true
	}
	for _, r := range v.routes {
		if l := v.links[r.Index]; r.Protocol == unix.RTPROT_RA && leadsOut(l) {
			names[l.Name] = true
		}
	}
	for _, l := range v.links {
		if l.Kind == device.KindHardware && l.Master == 0 && leadsOut(l) {
			names[l.Name] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// loosen loosens the reverse path filter of the uplinks by which packets come that the tunnel is the way back to, where it
// is strict, and puts back that of others.
func (c *sysctls) loosen(s *state) error {
	settings := s.view.settings
	var errs []error
	for _, l := range s.view.uplinks {
		name, index := rpFilterOf(l.Name), int(l.Index)
		of, crossed := settings[index], s.plan.Crossed[l.Name]
		before, ours := c.record.Sysctls[name]
		var err error
		switch {
		case crossed && max(of.RPFilter, settings[device.AllLinks].RPFilter) == strictRPFilter:
			if err = c.ensure(name, looseRPFilter, ours); err == nil {
				of.RPFilter = looseRPFilter
			}
		case !crossed && ours:
			if of.RPFilter, err = strconv.Atoi(before.Before); err == nil {
				err = errors.Join(c.putBack(name, before), c.record.forget(name))
			}
		}
		if settings[index] = of; !errors.Is(err, fs.ErrNotExist) { // else the link is gone meanwhile
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// inspect looks for what the kernel does not tell of. Packets to our ports are the programs': those to masquerade to, NodePorts and
// host ports, which are given here.
func (c *sysctls) inspect(s *state, used ...*ports) error {
	c.settle()
	var all ports
	for _, p := range used {
		if p != nil {
			all = all.with(*p)
		}
	}
	return c.ensurePorts(s, all)
}

// reserve keeps the kernel from giving our ports to sockets that ask for any.
// What else is reserved stays; what was ours before goes.
func (c *sysctls) reserve(ours ports) error {
	have, now, err := c.reserved()
	if err != nil {
		return err
	}
	others := now.without(addedBy(c.record.Sysctls[reservedPorts]))
	want := others.with(ours)
	if want == now {
		return nil
	}
	return c.change(reservedPorts, have, setting{Before: others.String(), Ours: want.String()}, c.kept.ephemeral != "" && have != c.kept.ports)
}

// reserved reads the ports that are reserved now.
func (c *sysctls) reserved() (text string, p ports, err error) {
	if text, err = c.Get(reservedPorts); err != nil {
		return text, p, err
	}
	if p, err = parsePorts(text); err != nil {
		return text, p, fmt.Errorf("sysctl %s: %w", reservedPorts, err)
	}
	return text, p, nil
}

// ensurePorts reserves our ports again when they have changed, or a service that applies its own settings has written another list or
// another range of ephemeral ports.
func (c *sysctls) ensurePorts(s *state, used ports) error {
	have, ephemeral, err := c.readPorts()
	if k := &c.kept; err != nil || have == k.ports && ephemeral == k.ephemeral && used == k.used {
		return err // as before, as it nearly always is
	}
	shares, err := c.portShares()
	if err != nil {
		return err
	}
	shares.add(used)
	if err := c.reserve(shares.ours); err != nil {
		return err
	}
	s.ports = &shares
	c.kept.used, c.kept.ephemeral = used, ephemeral
	c.kept.ports, err = c.ports.Get()
	return err
}

// readPorts reads reservedPorts and ephemeralPorts.
func (c *sysctls) readPorts() (reserved, ephemeral string, err error) {
	if c.ports == nil {
		if c.ports, err = c.Open(reservedPorts); err != nil {
			return "", "", err
		}
	}
	if c.ephemeral == nil {
		if c.ephemeral, err = c.Open(ephemeralPorts); err != nil {
			return "", "", err
		}
	}
	reserved, err1 := c.ports.Get()
	ephemeral, err2 := c.ephemeral.Get()
	return reserved, ephemeral, errors.Join(err1, err2)
}

// addedBy are the ports that we reserved and nobody before us.
func addedBy(s setting) ports {
	ours, err1 := parsePorts(s.Ours)
	before, err2 := parsePorts(s.Before)
	if err1 != nil || err2 != nil {
		return ports{}
	}
	return ours.without(before)
}

// restore puts back what still has our value. ip_forward stays on, and so does what the kernel changed along with it. Forwarding
// of IPv6 goes off, and does so first: a router would lose what its links learn from router advertisements.
func (c *sysctls) restore() error {
	var errs []error
	if v, set := c.record.Sysctls[ipv6Forward]; set {
		errs = append(errs, c.putBack(ipv6Forward, v))
	}
	forwarded, on := c.record.Sysctls[ipForward]
	on = on && forwarded.Before == "0"
	for name, v := range c.record.Sysctls {
		switch {
		case name == ipv6Forward:
		case name == ipForward:
			c.log.Info("sysctl left as it is: others may rely on it by now", "name", name, "value", v.Ours)
		case on && strings.HasSuffix(name, "/forwarding"): // of IPv4
			c.log.Debug("sysctl left as ip_forward made it", "name", name)
		case name == reservedPorts:
			errs = append(errs, c.unreserve(v))
		default:
			errs = append(errs, c.putBack(name, v))
		}
	}
	return errors.Join(errs...)
}

func (c *sysctls) putBack(name string, v setting) error {
	have, err := c.Get(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if have != v.Ours {
		c.log.Info("sysctl left as it is: somebody else has set it since", "name", name, "value", have, "ours", v.Ours)
		return nil
	}
	_, err = c.Set(name, asLine(v.Before))
	return err
}

// asLine ends a value with a newline: the kernel ignores a write of nothing.
func asLine(value string) string { return value + "\n" }

// unreserve takes out what we added; what others added since stays.
func (c *sysctls) unreserve(v setting) error {
	have, now, err := c.reserved()
	if err != nil {
		return err
	}
	added := addedBy(v)
	if added.without(now) != (ports{}) {
		c.log.Info("sysctl left as it is: somebody else has set it since", "name", reservedPorts, "value", have, "ours", v.Ours)
		return nil
	}
	_, err = c.Set(reservedPorts, asLine(now.without(added).String()))
	return err
}
