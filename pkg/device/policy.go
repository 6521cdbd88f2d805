package device

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Policy is an IPsec policy (`ip xfrm policy`) that transforms or blocks packets that the host sends or forwards.
type Policy struct {
	Src, Dst netip.Prefix
	// Out: it applies to packets that leave, else to those that are forwarded.
	Out bool
	// Required: packets that are not protected are dropped.
	Required bool
}

// Policies lists the policies of these families in the namespace of the calling goroutine's thread and, last, the host's default if
// that is to block. It leaves out policies that let everything pass, those of single sockets, and those of IPsec
// interfaces, to which routes lead.
func Policies(families ...int) ([]Policy, error) {
	var h *netlink.Handle
	err := ipsec.ask(time.Now(), func() (err error) {
		h, err = netlink.NewHandle(unix.NETLINK_XFRM)
		return err
	})
	if noIPsec(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	defer h.Close()
	var list []netlink.XfrmPolicy
	for _, family := range families {
		some, err := dump(func() ([]netlink.XfrmPolicy, error) { return h.XfrmPolicyList(family) })
		if err != nil {
			return nil, fmt.Errorf("list IPsec policies: %w", err)
		}
		list = append(list, some...)
	}
	var out []Policy
	for _, p := range list {
		asks := p.Action != netlink.XFRM_POLICY_ALLOW || len(p.Tmpls) > 0
		if asks && p.Ifid == 0 && (p.Dir == netlink.XFRM_DIR_OUT || p.Dir == netlink.XFRM_DIR_FWD) {
			out = append(out, Policy{prefix(p.Src), prefix(p.Dst), p.Dir == netlink.XFRM_DIR_OUT, required(p)})
		}
	}
	blocked, err := defaultPolicies(families)
	return append(out, blocked...), err
}

// Values that package netlink lacks: of enum xfrm_msg_type, and offsets in struct xfrm_userpolicy_default.
const (
	getDefault   = nl.XFRM_MSG_MAPPING + 2 // XFRM_MSG_GETDEFAULT
	defaultFwd   = 1
	defaultOut   = 2
	defaultSize  = 3
	defaultBlock = 1 // XFRM_USERPOLICY_BLOCK
)

// defaultPolicies expresses the host's default as policies (`ip xfrm policy getdefault`). Older kernels have none.
func defaultPolicies(families []int) ([]Policy, error) {
	req := nl.NewNetlinkRequest(getDefault, 0)
	req.AddRawData(make([]byte, defaultSize))
	var answers [][]byte
	err := again(func() (err error) {
		answers, err = req.Execute(unix.NETLINK_XFRM, getDefault)
		return err
	})
	if isErrno(err, unix.EINVAL, unix.ENOSYS, unix.EOPNOTSUPP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the default IPsec policy: %w", err)
	}
	if len(answers) != 1 || len(answers[0]) < defaultSize {
		return nil, errors.New("ask for the default IPsec policy: the answer is too short")
	}
	var out []Policy
	for _, direction := range []int{defaultOut, defaultFwd} {
		for _, family := range families {
			if answers[0][direction] == defaultBlock {
				out = append(out, Policy{Src: everythingOf(family), Dst: everythingOf(family), Out: direction == defaultOut, Required: true})
			}
		}
	}
	return out, nil
}

func everythingOf(family int) netip.Prefix {
	if family == IPv6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

func required(p netlink.XfrmPolicy) bool {
	for _, t := range p.Tmpls {
		if t.Optional == 0 {
			return true
		}
	}
	return p.Action != netlink.XFRM_POLICY_ALLOW
}

// noIPsec reports whether err means that the kernel has no IPsec.
func noIPsec(err error) bool { return errors.Is(err, unix.EPROTONOSUPPORT) }

// askAgain is how long a kernel without IPsec is not asked again, since each time it searches for the module.
const askAgain = time.Minute

// ability is a feature that the kernel may lack.
type ability struct {
	mu      sync.Mutex
	missing time.Time // until when it is assumed to be missing
}

var ipsec ability // of the kernel, whatever the namespace

// ask calls kernel, unless that has failed within askAgain because there is no IPsec.
func (a *ability) ask(now time.Time, kernel func() error) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if now.Before(a.missing) {
		return unix.EPROTONOSUPPORT
	}
	err := kernel()
	if noIPsec(err) {
		a.missing = now.Add(askAgain)
	}
	return err
}

// WatchPolicies is Watch for IPsec policies. While the kernel has no IPsec it waits for it.
func WatchPolicies(ctx context.Context, hear func(Event)) error {
	return whenThere(ctx, askAgain, func() error {
		return watch(ctx, hear, "IPsec policies", unix.NETLINK_XFRM, nl.XFRMNLGRP_POLICY)
	})
}

// whenThere repeats follow while it fails because the kernel has no IPsec.
func whenThere(ctx context.Context, pause time.Duration, follow func() error) error {
	for {
		if err := follow(); !noIPsec(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}
