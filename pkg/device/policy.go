package device

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Policy is an IPsec policy (`ip xfrm policy`) that asks something of packets that the host sends or forwards.
type Policy struct {
	Src, Dst netip.Prefix
	// Out says that it is about what leaves, else about what is forwarded.
	Out bool
	// Required says that what has not been protected does not pass.
	Required bool
}

// Policies lists the IPv4 ones in the namespace of the calling goroutine's thread. Those that let everything pass, of
// single sockets, and of IPsec interfaces, where a route decides what meets them, are not among them.
func Policies() ([]Policy, error) {
	h, err := netlink.NewHandle(unix.NETLINK_XFRM)
	if noIPsec(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	defer h.Close()
	list, err := dump(func() ([]netlink.XfrmPolicy, error) { return h.XfrmPolicyList(netlink.FAMILY_V4) })
	if err != nil {
		return nil, fmt.Errorf("list IPsec policies: %w", err)
	}
	var out []Policy
	for _, p := range list {
		asks := p.Action != netlink.XFRM_POLICY_ALLOW || len(p.Tmpls) > 0
		if asks && p.Ifid == 0 && (p.Dir == netlink.XFRM_DIR_OUT || p.Dir == netlink.XFRM_DIR_FWD) {
			out = append(out, Policy{prefix(p.Src), prefix(p.Dst), p.Dir == netlink.XFRM_DIR_OUT, required(p)})
		}
	}
	return out, nil
}

func required(p netlink.XfrmPolicy) bool {
	for _, t := range p.Tmpls {
		if t.Optional == 0 {
			return true
		}
	}
	return p.Action != netlink.XFRM_POLICY_ALLOW
}

// noIPsec says that a kernel has answered so.
func noIPsec(err error) bool { return errors.Is(err, unix.EPROTONOSUPPORT) }

// WatchPolicies calls changed after every change of IPsec policies, as Watch does of the network.
func WatchPolicies(ctx context.Context, changed func()) error {
	err := watch(ctx, changed, "IPsec policies", unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	if noIPsec(err) {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}
