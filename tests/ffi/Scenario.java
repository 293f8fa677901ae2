/* The scenario of scenario.c, in Java by JNA: java -cp jna.jar:. Scenario RANK NAME. LIBDC_LIBRARY is its path. */

import com.sun.jna.Callback;
import com.sun.jna.Library;
import com.sun.jna.Memory;
import com.sun.jna.Native;
import com.sun.jna.Pointer;
import com.sun.jna.Structure;
import com.sun.jna.ptr.PointerByReference;
import java.lang.ref.Reference;

public final class Scenario {
  private static final int RANKS = 2, WEIGHTS = 5, SHARD = 3, NONE = 0, FLOAT32 = 1;
  private static final long GRAPH = 1, ID = 7;

  public interface Log extends Callback {
    void line(int level, String message, Pointer user);
  }

  @Structure.FieldOrder({"struct_size", "data", "shape", "strides", "ndim", "dtype", "buffer"})
  public static class Tensor extends Structure {
    public long struct_size;
    public Pointer data, shape, strides;
    public int ndim, dtype;
    public Pointer buffer;

    public Tensor() {
      struct_size = size();
    }

    Tensor(Pointer data, Pointer shape) {
      this();
      this.data = data;
      this.shape = shape;
      ndim = 1;
      dtype = FLOAT32;
    }
  }

  @Structure.FieldOrder({"struct_size", "log", "log_user"})
  public static class ContextOptions extends Structure {
    public long struct_size;
    public Log log;
    public Pointer log_user;

    public ContextOptions() {
      struct_size = size();
    }
  }

  /* The names are the library's. */
  public interface Dc extends Library {
    String dc_version_string();
    int dc_api_version();
    String dc_last_error();
    String dc_status_name(int status);
    int dc_comm_create_processes(String name, int rank, int worldSize, Pointer options, PointerByReference comm);
    void dc_comm_destroy(Pointer comm);
    int dc_device_open(String name, Pointer options, PointerByReference device);
    void dc_device_destroy(Pointer device);
    int dc_context_create(Pointer device, ContextOptions options, PointerByReference context);
    void dc_context_destroy(Pointer context);
    int dc_init(Pointer context, Pointer comm, Pointer config, long bucket);
    int dc_register_z3_param(Pointer context, long id, Pointer shape, int ndim, Tensor shard, Tensor grad,
                             int persistent, int dtype);
    int dc_register_graph_z3(Pointer context, long graph, Pointer ids, long count);
    int dc_start_forward(Pointer context);
    int dc_end_forward(Pointer context);
    int dc_start_backward(Pointer context, int update);
    int dc_end_backward(Pointer context, long graph, int release);
    int dc_allgather_param(Pointer context, Tensor a, long graph, long id, int dtype, Tensor out);
    int dc_wait_allgather(Pointer context, Tensor a, long graph, long id);
    int dc_release_param(Pointer context, Tensor a, long graph, long id, long users);
    int dc_reduce_grad(Pointer context, Tensor a, long graph, long id);
    int dc_context_params_updated(Pointer context, Pointer ids, long count);
    int dc_context_get_memory_stats(Pointer context, Pointer stats);
  }

  private static final Dc dc = Native.load(System.getenv("LIBDC_LIBRARY"), Dc.class);

  private static void check(int status) {
    if (status != 0) {
      throw new IllegalStateException(dc.dc_status_name(status) + ": " + dc.dc_last_error());
    }
  }

  private static Memory floats(float[] values) {
    Memory memory = new Memory(4L * values.length);
    memory.write(0, values, 0, values.length);
    return memory;
  }

  private static Memory longs(long value) {
    Memory memory = new Memory(8);
    memory.setLong(0, value);
    return memory;
  }

  private static float[] show(String title, Pointer data, int count) {
    StringBuilder line = new StringBuilder(title);
    float[] values = data.getFloatArray(0, count);
    for (float value : values) {
      line.append(String.format(" %08x", Float.floatToRawIntBits(value)));
    }
    System.out.println(line);
    return values;
  }

  private static float[] gather(Pointer context, Tensor full) {
    check(dc.dc_allgather_param(context, null, GRAPH, ID, NONE, full));
    check(dc.dc_wait_allgather(context, null, GRAPH, ID));
    return show("full", full.data, WEIGHTS);
  }

  /* Returns the memory whose addresses the context has. */
  private static Memory[] step(Pointer context, int rank) {
    float[] weights = new float[SHARD];
    for (int i = 0; i < SHARD; i++) {
      weights[i] = (rank * SHARD + i) * 0.5f - 1;
    }
    Memory shard = floats(weights), gradient = floats(new float[SHARD]);
    Memory whole = longs(WEIGHTS), part = longs(SHARD), ids = longs(ID);
    Tensor full = new Tensor();
    check(dc.dc_register_z3_param(context, ID, whole, 1, new Tensor(shard, part), new Tensor(gradient, part), 0, NONE));
    check(dc.dc_register_graph_z3(context, GRAPH, ids, 1));

    check(dc.dc_start_forward(context));
    float[] own = gather(context, full);
    for (int i = 0; i < WEIGHTS; i++) {
      own[i] *= rank + 1;
    }
    check(dc.dc_release_param(context, null, GRAPH, ID, 2));
    check(dc.dc_end_forward(context)); // logs that one of two users still has it
    check(dc.dc_release_param(context, null, GRAPH, ID, 2));

    check(dc.dc_start_backward(context, 1));
    check(dc.dc_reduce_grad(context, new Tensor(floats(own), whole), GRAPH, ID));
    check(dc.dc_end_backward(context, GRAPH, 0));
    float[] received = show("grad", gradient, SHARD);
    for (int i = 0; i < SHARD; i++) {
      weights[i] -= 0.5f * received[i];
    }
    shard.write(0, weights, 0, SHARD);
    check(dc.dc_context_params_updated(context, ids, 1));
    gather(context, full);
    check(dc.dc_release_param(context, null, GRAPH, ID, 1));

    int status = dc.dc_allgather_param(context, null, GRAPH, 99, NONE, full);
    System.out.println("error " + status + " " + dc.dc_status_name(status) + " " + dc.dc_last_error());
    Memory stats = new Memory(144);
    stats.clear();
    stats.setLong(0, 144);
    check(dc.dc_context_get_memory_stats(context, stats));
    System.out.println("stats " + stats.getLong(64) + " " + stats.getLong(88) + " " + stats.getLong(128));
    return new Memory[] {shard, gradient};
  }

  public static void main(String[] arguments) {
    int rank = Integer.parseInt(arguments[0]);
    PointerByReference comm = new PointerByReference(), device = new PointerByReference();
    PointerByReference context = new PointerByReference();
    Memory user = new Memory(8);
    user.setString(0, "mine");
    ContextOptions options = new ContextOptions();
    options.log = (level, message, pointer) ->
        System.out.println("log " + pointer.getString(0) + " " + level + " " + message);
    options.log_user = user;
    System.out.println("libdc " + dc.dc_version_string() + " " + dc.dc_api_version());
    check(dc.dc_comm_create_processes(arguments[1], rank, RANKS, null, comm));
    check(dc.dc_device_open("cpu", null, device));
    check(dc.dc_context_create(device.getValue(), options, context));
    check(dc.dc_init(context.getValue(), comm.getValue(), null, 64));
    Memory[] registered = step(context.getValue(), rank);
    dc.dc_context_destroy(context.getValue());
    Reference.reachabilityFence(registered); /* the collector frees memory and callbacks that only C still has */
    Reference.reachabilityFence(options);
    dc.dc_device_destroy(device.getValue());
    dc.dc_comm_destroy(comm.getValue());
    System.out.println("done");
  }
}
