package ipam

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"
)

// FieldError says which field of the network configuration is wrong, and how.
type FieldError struct {
	Field  string
	Reason string
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Reason }

// ArgsError says what is wrong in CNI_ARGS.
type ArgsError struct {
	Reason string
}

func (e *ArgsError) Error() string { return "CNI_ARGS: " + e.Reason }

// Config is the configuration of host-local for one call.
type Config struct {
	Ranges     []allocator.RangeSet
	Routes     []*types.Route
	ResolvConf string
	// Requested are the addresses that the runtime asks for: from CNI_ARGS IP=, then args.cni.ips, then runtimeConfig.ips.
	Requested []netip.Addr
	// Unknown names fields of the ipam section that have no meaning here.
	Unknown []string
}

type section map[string]json.RawMessage

// Parse reads the ipam section and everything else of a network configuration that host-local looks at. Errors are of
// type *FieldError and *ArgsError.
func Parse(conf []byte, args string) (Config, error) {
	var c Config
	var top struct {
		IPAM          section `json:"ipam"`
		RuntimeConfig section `json:"runtimeConfig"`
		Args          section `json:"args"`
	}
	if err := json.Unmarshal(conf, &top); err != nil {
		return c, &FieldError{"ipam", "must be an object: " + err.Error()}
	}
	if err := c.parseSection(top.IPAM); err != nil {
		return c, err
	}
	if err := c.parseRanges(top.IPAM, top.RuntimeConfig); err != nil {
		return c, err
	}
	return c, c.parseRequested(top.RuntimeConfig, top.Args, args)
}

func (c *Config) parseSection(s section) error {
	if err := s.decode("ipam", "routes", &c.Routes); err != nil {
		return err
	}
	for i, r := range c.Routes {
		if r == nil || r.Dst.IP == nil || r.Dst.Mask == nil {
			return &FieldError{fmt.Sprintf("ipam.routes[%d].dst", i), "must be a prefix such as 0.0.0.0/0"}
		}
	}
	if err := s.decode("ipam", "resolvConf", &c.ResolvConf); err != nil {
		return err
	}
	known := []string{
		"type", "ranges", "routes", "resolvConf", "subnet", "rangeStart", "rangeEnd", "gateway",
		// Ignored: our store is always in the state directory, which does not survive a boot. Configurations for the
		// host-local plugin have it.
		"dataDir",
	}
	for name := range s {
		if !slices.Contains(known, name) {
			c.Unknown = append(c.Unknown, "ipam."+name)
		}
	}
	slices.Sort(c.Unknown)
	return nil
}

func (s section) decode(parent, name string, into any) error {
	raw, ok := s[name]
	if !ok {
		return nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return &FieldError{parent + "." + name, err.Error()}
	}
	return nil
}

// parseRanges reads the range sets in host-local's order: the runtime's, the old form's single range, the list.
func (c *Config) parseRanges(ipam, runtime section) error {
	var single allocator.Range
	var listed, given []allocator.RangeSet
	for name, into := range map[string]any{
		"ranges": &listed, "subnet": &single.Subnet, "rangeStart": &single.RangeStart, "rangeEnd": &single.RangeEnd,
		"gateway": &single.Gateway,
	} {
		if err := ipam.decode("ipam", name, into); err != nil {
			return err
		}
	}
	if err := runtime.decode("runtimeConfig", "ipRanges", &given); err != nil {
		return err
	}
	field := make([]string, 0, len(given)+1+len(listed))
	for i := range given {
		field = append(field, fmt.Sprintf("runtimeConfig.ipRanges[%d]", i))
	}
	c.Ranges = given
	if single.Subnet.IP != nil {
		c.Ranges = append(c.Ranges, allocator.RangeSet{single})
		field = append(field, "ipam.subnet")
	}
	for i := range listed {
		field = append(field, fmt.Sprintf("ipam.ranges[%d]", i))
	}
	c.Ranges = append(c.Ranges, listed...)
	if len(c.Ranges) == 0 {
		return &FieldError{"ipam.ranges", "must name at least one range, as in [[{\"subnet\": \"10.244.1.0/24\"}]]"}
	}
	return c.checkRanges(field)
}

func (c *Config) checkRanges(field []string) error {
	families := map[bool]string{}
	for i := range c.Ranges {
		if err := checkMasks(c.Ranges[i]); err != nil {
			return &FieldError{field[i], err.Error()}
		}
		if err := c.Ranges[i].Canonicalize(); err != nil {
			return &FieldError{field[i], err.Error()}
		}
		first, _ := netip.AddrFromSlice(c.Ranges[i][0].RangeStart)
		first = first.Unmap()
		if !Assignable(first) {
			return &FieldError{field[i], fmt.Sprintf("%s: no pod can have such an address", first)}
		}
		if other, ok := families[first.Is4()]; ok {
			return &FieldError{field[i], "is of the same family as " + other + ": a pod has one address of each family"}
		}
		families[first.Is4()] = field[i]
	}
	return nil
}

// Assignable reports whether a pod can have the address. Of IPv6's link-local ones its interface has one anyway, and no
// route leads there.
func Assignable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && !(a.Is6() && a.IsLinkLocalUnicast())
}

// checkMasks refuses what the library fails to handle: a range without a subnet, and an IPv4 address with an IPv6 mask
// ("::ffff:10.0.0.0/104").
func checkMasks(set allocator.RangeSet) error {
	for _, r := range set {
		if r.Subnet.IP == nil {
			return errors.New("a range must have a subnet")
		}
		if r.Subnet.IP.To4() != nil && len(r.Subnet.Mask) != net.IPv4len {
			return fmt.Errorf("subnet %s: write an IPv4 prefix as IPv4", r.Subnet.IP)
		}
	}
	return nil
}

func (c *Config) parseRequested(runtime, args section, env string) error {
	if err := c.requestByEnv(env); err != nil {
		return err
	}
	var inner section
	if err := args.decode("args", "cni", &inner); err != nil {
		return err
	}
	if err := c.request(inner, "args.cni"); err != nil {
		return err
	}
	return c.request(runtime, "runtimeConfig")
}

func (c *Config) request(s section, parent string) error {
	var ips []string
	if err := s.decode(parent, "ips", &ips); err != nil {
		return err
	}
	for i, text := range ips {
		field := fmt.Sprintf("%s.ips[%d]", parent, i)
		a, err := parseAddr(text)
		if err != nil {
			return &FieldError{field, err.Error()}
		}
		if err := c.want(a); err != nil {
			return &FieldError{field, err.Error()}
		}
	}
	return nil
}

// requestByEnv reads IP= from CNI_ARGS, "K=V;K=V". Other keys are for other plugins; the library has checked the form.
func (c *Config) requestByEnv(env string) error {
	for pair := range strings.SplitSeq(env, ";") {
		key, value, _ := strings.Cut(pair, "=")
		if key != "IP" || value == "" {
			continue
		}
		a, err := parseAddr(value)
		if err != nil {
			return &ArgsError{"IP=" + value + ": " + err.Error()}
		}
		if err := c.want(a); err != nil {
			return &ArgsError{"IP=" + value + ": " + err.Error()}
		}
	}
	return nil
}

// parseAddr reads an address. A prefix length is ignored: pods' addresses have none.
func parseAddr(text string) (netip.Addr, error) {
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.Addr().Unmap(), nil
	}
	a, err := netip.ParseAddr(text)
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", text)
	}
	return a.Unmap(), nil
}

// want adds a request. The same address may be requested twice, but not two addresses of one range set.
func (c *Config) want(a netip.Addr) error {
	if slices.Contains(c.Requested, a) {
		return nil
	}
	i := c.setOf(a)
	if i < 0 {
		return fmt.Errorf("%s is in none of the ranges", a)
	}
	for _, other := range c.Requested {
		if c.setOf(other) == i {
			return fmt.Errorf("%s and %s are requested, but a pod has one address of each family", other, a)
		}
	}
	if r, err := c.Ranges[i].RangeFor(a.AsSlice()); err == nil && bytes.Equal(r.Gateway, a.AsSlice()) {
		return fmt.Errorf("%s is the range's gateway", a)
	}
	c.Requested = append(c.Requested, a)
	return nil
}

func (c *Config) setOf(a netip.Addr) int {
	return slices.IndexFunc(c.Ranges, func(s allocator.RangeSet) bool { return s.Contains(a.AsSlice()) })
}

// requestedIn returns the requested address of range set i, invalid if there is none.
func (c *Config) requestedIn(i int) netip.Addr {
	for _, a := range c.Requested {
		if c.setOf(a) == i {
			return a
		}
	}
	return netip.Addr{}
}
