package agent

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	// linger is how long the programs work beside netfilter after the last rule
	// that translates is gone: kube-proxy and others write theirs anew.
	linger = time.Minute
	// retryMode is when another attempt is made at a mode that did not come about:
	// each costs the verifier's work.
	retryMode = 15 * time.Second
)

// translation follows whether netfilter translates on this node, and what the
// programs do about it. All of it belongs to one goroutine.
type translation struct {
	mode KubeProxyMode
	nft  nftables
	// beside says that the programs work beside netfilter's translation.
	beside bool
	// where a rule stands, or stood, that translates; seen is when it last did.
	where string
	seen  time.Time
	// again is when to look again, after a failure.
	again time.Time
	// failure is why the newest change of what the programs do did not come about; nil: it did.
	failure error
	// changing says that the programs are being replaced.
	changing bool
}

// look finds out what the programs should do. After an error they should go on as
// they do.
func (t *translation) look(now time.Time) (beside bool, err error) {
	if t.mode != KubeProxyAuto {
		return t.mode == KubeProxyOn, nil
	}
	where, err := t.nft.find(now)
	if where == "" {
		var older error
		where, older = findInIptables()
		err = errors.Join(err, older)
	}
	switch {
	case where != "":
		t.where, t.seen = where, now
		return true, nil
	case err != nil || !t.beside:
		return t.beside, err
	case now.Sub(t.seen) < linger:
		return true, nil
	}
	return t.outlived(now)
}

// olderFlows stands for rules that are not there, or can't be read, while flows may be that they have translated.
const olderFlows = "flows of rules that are not there"

// begin is look for a process that has seen nothing yet. The rules may be away for a moment, as when kube-proxy changes
// its mode, and flows that they have translated must not be taken past netfilter. When in doubt the programs work beside it,
// which is right for every packet.
func (t *translation) begin(now time.Time) (beside bool, err error) {
	beside, err = t.look(now)
	if beside || t.mode != KubeProxyAuto || !tracksConnections() {
		return beside, err
	}
	t.where = olderFlows
	older, flowsErr := t.outlived(now)
	if err != nil {
		t.seen = now
	}
	return older || err != nil, errors.Join(err, flowsErr)
}

// tracksConnections says whether the kernel has a connection table. Without one there is nothing to translate with.
func tracksConnections() bool {
	_, err := os.Stat("/proc/sys/net/netfilter/nf_conntrack_max")
	return !errors.Is(err, fs.ErrNotExist)
}

// outlived says whether flows go on that were translated by rules which are gone.
// To ask for them takes a look at every flow, so it is done now and then.
func (t *translation) outlived(now time.Time) (bool, error) {
	found, err := translatedFlows()
	if found || err != nil {
		t.seen = now
	}
	return found || err != nil, err
}

// describe says beside what the programs work; empty: netfilter does not translate.
func (t *translation) describe() string {
	switch {
	case !t.beside:
		return ""
	case t.mode == KubeProxyOn:
		return "--kube-proxy=on"
	}
	return t.where
}

// The attributes and bits of netfilter's connection table that are used here:
// enum ctattr_type and enum ip_conntrack_status.
const (
	getConntrack        = 1 // IPCTNL_MSG_CT_GET
	conntrackStatus     = 3 // CTA_STATUS
	conntrackStatusMask = 26
	sourceTranslated    = 1 << 4 // IPS_SRC_NAT
	targetTranslated    = 1 << 5 // IPS_DST_NAT
)

// translatedFlows says whether netfilter's connection table has any flow whose
// addresses it changes. The kernel sorts out the others.
func translatedFlows() (bool, error) {
	for _, bit := range []uint32{sourceTranslated, targetTranslated} {
		wanted := binary.BigEndian.AppendUint32(nil, bit)
		req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|getConntrack, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_INET, Version: nl.NFNETLINK_V0})
		req.AddData(nl.NewRtAttr(conntrackStatus, wanted))
		req.AddData(nl.NewRtAttr(conntrackStatusMask, wanted))
		found := false
		err := req.ExecuteIter(unix.NETLINK_NETFILTER, 0, func([]byte) bool { found = true; return false })
		if found {
			return true, nil
		}
		if err != nil && !errors.Is(err, unix.EINVAL) { // a kernel without that table
			return false, fmt.Errorf("list translated flows: %w", err)
		}
	}
	return false, nil
}

// explainMode says what to do when the programs don't load because the kernel
// does not let them ask netfilter's connection table.
func explainMode(err error, beside bool) error {
	if err == nil || !beside || !strings.Contains(err.Error(), "unknown kfunc") {
		return err
	}
	const module = "/sys/kernel/btf/nf_conntrack"
	remedy := "the module nf_conntrack is not loaded: `modprobe nf_conntrack`"
	if _, statErr := os.Stat(module); statErr == nil {
		remedy = "nf_conntrack is a module here, whose functions the kernel gives to nobody without CAP_SYS_ADMIN: " +
			"add SYS_ADMIN to the agent's capabilities"
	}
	return fmt.Errorf("work beside netfilter's translation: %s, or set --kube-proxy=off where nothing translates: %w", remedy, err)
}

// followTranslation has the programs work beside netfilter's translation for as
// long as there is one.
func (r *reconciler) followTranslation(now time.Time) {
	t := &r.translation
	if t.changing || now.Before(t.again) {
		return
	}
	beside, err := t.look(now)
	if err != nil {
		r.complain("netfilter's rules", err)
	} else {
		r.settled("netfilter's rules")
	}
	if beside != t.beside {
		t.changing = true
		r.modes.wanted <- beside
	}
}

// modes connects the reconciler with the goroutine that replaces the programs:
// routes and pods must not wait for the verifier, nor for the plugin's work to end.
// The reconciler wants nothing more before it has taken the outcome.
type modes struct {
	wanted  chan bool
	outcome chan outcome
}

type outcome struct {
	beside bool
	err    error
}

func newModes() modes { return modes{make(chan bool, 1), make(chan outcome, 1)} }

// changeModes replaces the programs when that is wanted, until ctx ends.
func (r *reconciler) changeModes(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case beside := <-r.modes.wanted:
			r.changeMode(ctx, beside)
		}
	}
}

func (r *reconciler) changeMode(ctx context.Context, beside bool) {
	err := r.dp.Reconfigure(ctx, r.cfg.nodeConfig(beside))
	r.modes.outcome <- outcome{beside, explainMode(err, beside)}
}

// modeChanged takes the outcome.
func (r *reconciler) modeChanged(ctx context.Context, o outcome, now time.Time) {
	t := &r.translation
	t.changing, t.failure = false, o.err
	if o.err != nil {
		t.again = now.Add(retryMode)
		if ctx.Err() == nil {
			r.complain("netfilter's translation", o.err)
		}
		return
	}
	r.settled("netfilter's translation")
	t.beside = o.beside
	r.tellTranslation()
}

// tellTranslation says beside what the programs work now.
func (r *reconciler) tellTranslation() {
	where := r.translation.describe()
	r.status.besideNetfilter(where != "")
	if where == "" {
		r.log.Info("nothing translates addresses on this node; packets pass netfilter by")
	} else {
		r.log.Info("working beside netfilter's translation of addresses", "found", where)
	}
}
