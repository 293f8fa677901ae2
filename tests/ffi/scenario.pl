# The scenario of scenario.c, in Perl by FFI::Platypus: perl scenario.pl RANK NAME. LIBDC_LIBRARY names the library.
use strict;
use warnings;
use FFI::Platypus 2.00;
use FFI::Platypus::Buffer qw(scalar_to_pointer);
use FFI::Platypus::Memory qw(memcpy);

$| = 1;
my ($RANKS, $WEIGHTS, $SHARD, $GRAPH, $ID, $NONE, $FLOAT32) = (2, 5, 3, 1, 7, 0, 1);
my ($rank, $name) = @ARGV;
my $ffi = FFI::Platypus->new(api => 2, lib => $ENV{LIBDC_LIBRARY});

my %functions = (
    version_string        => [[] => 'string'],
    api_version           => [[] => 'uint32'],
    last_error            => [[] => 'string'],
    status_name           => [['sint32'] => 'string'],
    comm_create_processes => [['string', 'sint32', 'sint32', 'opaque', 'opaque*'] => 'sint32'],
    comm_destroy          => [['opaque'] => 'void'],
    device_open           => [['string', 'opaque', 'opaque*'] => 'sint32'],
    device_destroy        => [['opaque'] => 'void'],
    context_create        => [['opaque', 'opaque', 'opaque*'] => 'sint32'],
    context_destroy       => [['opaque'] => 'void'],
    init                  => [['opaque', 'opaque', 'opaque', 'sint64'] => 'sint32'],
    register_z3_param =>
        [['opaque', 'sint64', 'opaque', 'sint32', 'opaque', 'opaque', 'sint32', 'sint32'] => 'sint32'],
    register_graph_z3 => [['opaque', 'sint64', 'opaque', 'sint64'] => 'sint32'],
    start_forward     => [['opaque'] => 'sint32'],
    end_forward       => [['opaque'] => 'sint32'],
    start_backward    => [['opaque', 'sint32'] => 'sint32'],
    end_backward      => [['opaque', 'sint64', 'sint32'] => 'sint32'],
    allgather_param   => [['opaque', 'opaque', 'sint64', 'sint64', 'sint32', 'opaque'] => 'sint32'],
    wait_allgather    => [['opaque', 'opaque', 'sint64', 'sint64'] => 'sint32'],
    release_param     => [['opaque', 'opaque', 'sint64', 'sint64', 'sint64'] => 'sint32'],
    reduce_grad       => [['opaque', 'opaque', 'sint64', 'sint64'] => 'sint32'],
    context_params_updated => [['opaque', 'opaque', 'sint64'] => 'sint32'],
    context_get_memory_stats => [['opaque', 'opaque'] => 'sint32'],
);
$ffi->attach(["dc_$_" => $_], @{$functions{$_}}) for keys %functions;

sub check { my ($status) = @_; die status_name($status) . ': ' . last_error() . "\n" if $status != 0 }
sub show { my ($title, $floats) = @_; print join(' ', $title, map { sprintf '%08x', $_ } unpack 'L*', $floats), "\n" }

# dc_tensor is packed as its seven fields; memory and length are Perl strings, which must stay.
sub tensor {
    my ($data, $length) = @_;
    return pack 'QQQQllQ', 48, (0) x 6 unless $data;
    return pack 'QQQQllQ', 48, scalar_to_pointer($$data), scalar_to_pointer($$length), 0, 1, $FLOAT32, 0;
}

printf "libdc %s %d\n", version_string(), api_version();
my ($comm, $device, $context);
check(comm_create_processes($name, $rank, $RANKS, undef, \$comm));
check(device_open('cpu', undef, \$device));
my $log = $ffi->closure(sub { my ($level, $message, $user) = @_; print "log $user $level $message\n" });
my $user = "mine\0";
my $options = pack 'QQQ', 24, $ffi->cast('(sint32, string, string)->void' => 'opaque', $log), scalar_to_pointer($user);
check(context_create($device, scalar_to_pointer($options), \$context));
check(init($context, $comm, undef, 64));

my $weights = pack 'f*', map { ($rank * $SHARD + $_) * 0.5 - 1 } 0 .. $SHARD - 1;
my $gradient = "\0" x (4 * $SHARD);
my ($whole, $part, $ids) = map { pack 'q', $_ } $WEIGHTS, $SHARD, $ID;
my ($shard, $grad) = (tensor(\$weights, \$part), tensor(\$gradient, \$part));
check(register_z3_param($context, $ID, scalar_to_pointer($whole), 1, scalar_to_pointer($shard),
    scalar_to_pointer($grad), 0, $NONE));
check(register_graph_z3($context, $GRAPH, scalar_to_pointer($ids), 1));

my $full = tensor();

sub gather {
    check(allgather_param($context, undef, $GRAPH, $ID, $NONE, scalar_to_pointer($full)));
    check(wait_allgather($context, undef, $GRAPH, $ID));
    my $values = "\0" x (4 * $WEIGHTS);
    memcpy(scalar_to_pointer($values), (unpack 'QQ', $full)[1], 4 * $WEIGHTS);
    show('full', $values);
    return $values;
}

check(start_forward($context));
my $own = pack 'f*', map { $_ * ($rank + 1) } unpack 'f*', gather();
check(release_param($context, undef, $GRAPH, $ID, 2));
check(end_forward($context));    # logs that one of two users still has it
check(release_param($context, undef, $GRAPH, $ID, 2));

check(start_backward($context, 1));
my $own_grad = tensor(\$own, \$whole);
check(reduce_grad($context, scalar_to_pointer($own_grad), $GRAPH, $ID));
check(end_backward($context, $GRAPH, 0));
show('grad', $gradient);
my @gradient = unpack 'f*', $gradient;
my @updated = map { (unpack 'f*', $weights)[$_] - 0.5 * $gradient[$_] } 0 .. $SHARD - 1;
substr($weights, 0, length $weights) = pack 'f*', @updated;    # in place: the library has its address
check(context_params_updated($context, scalar_to_pointer($ids), 1));
gather();
check(release_param($context, undef, $GRAPH, $ID, 1));

my $status = allgather_param($context, undef, $GRAPH, 99, $NONE, scalar_to_pointer($full));
print join(' ', 'error', $status, status_name($status), last_error()), "\n";
my $stats = pack 'Qq17', 144, (0) x 17;
check(context_get_memory_stats($context, scalar_to_pointer($stats)));
print join(' ', 'stats', (unpack 'Qq17', $stats)[8, 11, 16]), "\n";
context_destroy($context);
device_destroy($device);
comm_destroy($comm);
print "done\n";
