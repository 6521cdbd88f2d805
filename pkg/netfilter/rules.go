package netfilter

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// nftBatch is a transaction of nftables: all of its changes come about, or none.
type nftBatch struct {
	generation uint32 // of the rules that it is meant for, else the kernel answers ERESTART; 0: whatever they are
	messages   []byte
	last       uint32 // sequence number of the newest message
	newest     int    // where that begins
}

// add appends a change.
func (b *nftBatch) add(message, flags int, family uint8, attrs ...*nl.RtAttr) {
	b.message(unix.NFNL_SUBSYS_NFTABLES<<8|message, flags, family, 0, attrs...)
}

func (b *nftBatch) message(kind, flags int, family uint8, resource uint16, attrs ...*nl.RtAttr) {
	b.last++
	b.newest = len(b.messages)
	req := nl.NewNetlinkRequest(kind, flags)
	req.Seq = b.last
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0, ResId: resource})
	for _, a := range attrs {
		req.AddData(a)
	}
	b.messages = append(b.messages, req.Serialize()...) //nolint:misspell // the library's name
}

// commit sends the batch. Of several errors it returns the first.
func (b *nftBatch) commit() (err error) {
	var whole nftBatch
	ofNftables := nl.Swap16(unix.NFNL_SUBSYS_NFTABLES) // big-endian
	var meant []*nl.RtAttr
	if b.generation != 0 {
		const generation = 1 // NFNL_BATCH_GENID
		meant = []*nl.RtAttr{number(generation, b.generation)}
	}
	whole.message(unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, ofNftables, meant...)
	newest := len(whole.messages) + b.newest
	whole.messages = append(whole.messages, b.messages...)
	// An answer to each would be more than the socket holds. An error is answered in any case.
	binary.NativeEndian.PutUint16(whole.messages[newest+flagsAt:], binary.NativeEndian.Uint16(whole.messages[newest+flagsAt:])|unix.NLM_F_ACK)
	whole.message(unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, ofNftables)

	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netlink socket: %w", err)
	}
	defer unix.Close(fd)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*len(whole.messages)) // many are more than a socket takes
	if err := unix.Sendto(fd, whole.messages, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	answered := false
	buffer := make([]byte, nl.RECEIVE_BUFFER_SIZE)
	for { // the kernel has worked before it returned: all answers are there
		n, _, err := unix.Recvfrom(fd, buffer, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN) && !answered:
			return errors.New("the kernel does not answer")
		case errors.Is(err, unix.EAGAIN):
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		}
		answered = true
		if errno := firstError(buffer[:n]); errno != 0 {
			return errno
		}
	}
}

// flagsAt is where the flags are in struct nlmsghdr.
const flagsAt = 6

// firstError reads acknowledgements.
func firstError(b []byte) unix.Errno {
	for len(b) >= unix.SizeofNlMsghdr+unix.SizeofNlMsgerr {
		length := int(nl.NativeEndian().Uint32(b))
		if length < unix.SizeofNlMsghdr+unix.SizeofNlMsgerr || length > len(b) {
			return unix.EPROTO
		}
		if code := int32(nl.NativeEndian().Uint32(b[unix.SizeofNlMsghdr:])); nl.NativeEndian().Uint16(b[4:]) == unix.NLMSG_ERROR && code != 0 {
			return unix.Errno(-code)
		}
		b = b[min(len(b), (length+unix.NLMSG_ALIGNTO-1)&^(unix.NLMSG_ALIGNTO-1)):]
	}
	return 0
}

// register is the one that expressions leave their result in, and take it from.
const register = unix.NFT_REG_1

// expression is one step of a rule.
func expression(name string, attrs ...*nl.RtAttr) *nl.RtAttr {
	e := nl.NewRtAttr(unix.NFTA_LIST_ELEM|unix.NLA_F_NESTED, nil)
	e.AddRtAttr(unix.NFTA_EXPR_NAME, nl.ZeroTerminated(name))
	if len(attrs) > 0 {
		data := e.AddRtAttr(unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, nil)
		for _, a := range attrs {
			data.AddChild(a)
		}
	}
	return e
}

func number(kind int, n uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.BEUint32Attr(n)) }

func value(kind int, v []byte) *nl.RtAttr {
	a := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	a.AddRtAttr(unix.NFTA_DATA_VALUE, v)
	return a
}

// meta reads something that is known of the packet beside its content.
func meta(key uint32) *nl.RtAttr {
	return expression("meta", number(unix.NFTA_META_KEY, key), number(unix.NFTA_META_DREG, register))
}

// payload reads bytes of a header.
func payload(header, offset, length uint32) *nl.RtAttr {
	return expression("payload", number(unix.NFTA_PAYLOAD_DREG, register), number(unix.NFTA_PAYLOAD_BASE, header),
		number(unix.NFTA_PAYLOAD_OFFSET, offset), number(unix.NFTA_PAYLOAD_LEN, length))
}

// anyBit ends the rule for packets of which what was read has none of these bits.
func anyBit(bits uint32) []*nl.RtAttr {
	mask := binary.NativeEndian.AppendUint32(nil, bits)
	return []*nl.RtAttr{masked(mask), compare(unix.NFT_CMP_NEQ, make([]byte, len(mask)))}
}

// masked leaves of what was read the bits of a mask.
func masked(mask []byte) *nl.RtAttr {
	return expression("bitwise", number(unix.NFTA_BITWISE_SREG, register), number(unix.NFTA_BITWISE_DREG, register),
		number(unix.NFTA_BITWISE_LEN, uint32(len(mask))), value(unix.NFTA_BITWISE_MASK, mask), value(unix.NFTA_BITWISE_XOR, make([]byte, len(mask))))
}

// The verdicts of nftables' rules.
const (
	dropped  = 0 // NF_DROP
	accepted = 1 // NF_ACCEPT
)

// drop is the end of the packet.
func drop() *nl.RtAttr { return verdict(dropped) }

// verdict is the end of the rule, and of what the packet goes through.
func verdict(code uint32) *nl.RtAttr {
	data := nl.NewRtAttr(unix.NFTA_IMMEDIATE_DATA|unix.NLA_F_NESTED, nil)
	data.AddRtAttr(unix.NFTA_DATA_VERDICT|unix.NLA_F_NESTED, nil).AddRtAttr(unix.NFTA_VERDICT_CODE, nl.BEUint32Attr(code))
	return expression("immediate", number(unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), data)
}

// compare ends the rule for packets of which what was read does not compare so.
func compare(operator uint32, with []byte) *nl.RtAttr {
	return expression("cmp", number(unix.NFTA_CMP_SREG, register), number(unix.NFTA_CMP_OP, operator), value(unix.NFTA_CMP_DATA, with))
}
